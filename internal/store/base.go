package store

import "io"

// Sample is some pages of the memory that a chain of layers stands for, evenly
// out of those with data. By it one finds a base for Materialize without
// knowing what the files there are were made of.
type Sample struct {
	pages []int64
	sums  []sum
}

// samplePages is how many pages a sample has, or all there are.
const samplePages = 64

// NewSample takes a sample of the memory of the layers, which are as those of
// MaterializeConfig. No payload is read.
func NewSample(memoryBytes int64, layers []*Layer) (*Sample, error) {
	m, err := newMaterialization(memoryBytes, layers)
	if err != nil {
		return nil, err
	}
	total := int64(0)
	for _, t := range m.tasks {
		for p := range m.pieces(t) {
			total += p.count
		}
	}
	s, step, next := &Sample{}, max(1, (total+samplePages-1)/samplePages), int64(0)
	for _, t := range m.tasks {
		sums := m.layers[t.layer].frames[t.frame].sums
		for p := range m.pieces(t) {
			for ; next < p.count; next += step {
				s.pages, s.sums = append(s.pages, p.first+next), append(s.sums, sums[p.at+next])
			}
			next -= p.count
		}
	}
	return s, nil
}

// In tells which part of the sample a memory has, from 0 to 1; what cannot be
// read it does not have.
func (s *Sample) In(memory io.ReaderAt) float64 {
	b, found := make([]byte, PageSize), 0
	for i, page := range s.pages {
		if readFull(memory, b, page*PageSize) == nil && sumOf(b) == s.sums[i] {
			found++
		}
	}
	return float64(found) / float64(max(1, len(s.pages)))
}

// inBase reads the pages that are used of a frame from the base, to where the
// payload has them; found when all are there, by their digests.
func (m *materialization) inBase(t task, b *buffers) (data []byte, found bool) {
	if m.base == nil {
		return nil, false
	}
	sums := m.layers[t.layer].frames[t.frame].sums
	data = sized(&b.data, len(sums)*PageSize+decoderSlack)
	for p := range m.pieces(t) {
		got := data[p.at*PageSize:][:p.count*PageSize]
		if readFull(m.base, got, p.first*PageSize) != nil {
			return nil, false
		}
		for i := range p.count {
			if sumOf(got[i*PageSize:][:PageSize]) != sums[p.at+i] {
				return nil, false
			}
		}
	}
	return data, true
}
