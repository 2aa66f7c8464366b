package oci

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/holdpoint/holdpoint/internal/errdefs"
)

// maxWords is how many entries a list or map of a config may have.
const maxWords = 10_000

// Config is what an image says about running it, checked and otherwise as it
// is there.
type Config struct {
	// User is as it stands in the image: empty for root, or a name or number
	// of a user, with ":" and that of a group behind it. Tree.User resolves it.
	User string
	// Env is NAME=value, in the image's order.
	Env []string
	// WorkingDir is absolute and clean, "/" where the image says none. It need
	// not exist in the tree.
	WorkingDir string
	// Entrypoint and Cmd make up the command, one after the other.
	Entrypoint, Cmd []string
	// ExposedPorts are sorted by number, then protocol.
	ExposedPorts []Port
	// Volumes are absolute, clean and sorted.
	Volumes []string
}

// Port is a port that the image's program listens on.
type Port struct {
	Number uint16
	// Protocol is tcp, udp or sctp.
	Protocol string
}

// Command is what a container of the image runs; empty where it says none.
func (c Config) Command() []string { return slices.Concat(c.Entrypoint, c.Cmd) }

// document is the config as it is in a layout.
type document struct {
	OS           string `json:"os"`
	Architecture string `json:"architecture"`
	Config       struct {
		User         string              `json:"User"`
		Env          []string            `json:"Env"`
		WorkingDir   string              `json:"WorkingDir"`
		Entrypoint   []string            `json:"Entrypoint"`
		Cmd          []string            `json:"Cmd"`
		ExposedPorts map[string]struct{} `json:"ExposedPorts"`
		Volumes      map[string]struct{} `json:"Volumes"`
	} `json:"config"`
	RootFS struct {
		Type    string   `json:"type"`
		DiffIDs []string `json:"diff_ids"`
	} `json:"rootfs"`
}

// readConfig sets img.Config and returns the digest of each unpacked layer.
func (img *Image) readConfig(data []byte, layers int) ([]digest, error) {
	var doc document
	if err := parse("the config", data, &doc); err != nil {
		return nil, err
	}
	switch {
	case !platform{doc.OS, doc.Architecture}.isOurs():
		return nil, errdefs.New(errdefs.Unsupported, "the image is for %.100q and not for linux/amd64", doc.OS+"/"+doc.Architecture)
	case doc.RootFS.Type != "layers":
		return nil, errdefs.New(errdefs.Unsupported, "the config's rootfs is of type %.100q and not of layers", doc.RootFS.Type)
	case layers > maxLayers:
		return nil, errdefs.New(errdefs.Invalid, "the image has %d layers, more than %d", layers, maxLayers)
	case len(doc.RootFS.DiffIDs) != layers:
		return nil, errdefs.New(errdefs.Invalid, "the manifest names %d layers and the config %d", layers, len(doc.RootFS.DiffIDs))
	}
	var diffIDs []digest
	for _, text := range doc.RootFS.DiffIDs {
		d, err := parseDigest(text)
		if err != nil {
			return nil, err
		}
		diffIDs = append(diffIDs, d)
	}
	var err error
	img.Config, err = doc.config()
	return diffIDs, err
}

func (doc document) config() (Config, error) {
	c := doc.Config
	for _, n := range []int{len(c.Env), len(c.Entrypoint), len(c.Cmd), len(c.ExposedPorts), len(c.Volumes)} {
		if n > maxWords {
			return Config{}, errdefs.New(errdefs.Invalid, "the config has a list of more than %d entries", maxWords)
		}
	}
	for _, word := range slices.Concat(c.Env, c.Entrypoint, c.Cmd, []string{c.User, c.WorkingDir}) {
		if strings.ContainsRune(word, 0) {
			return Config{}, errdefs.New(errdefs.Invalid, "the config has a zero byte in %.100q", word)
		}
	}
	for _, e := range c.Env {
		if name, _, ok := strings.Cut(e, "="); !ok || name == "" {
			return Config{}, errdefs.New(errdefs.Invalid, "the config's variable %.100q is not NAME=value", e)
		}
	}
	out := Config{
		User: c.User, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd,
		// A relative one counts from the root, as in Docker.
		WorkingDir: path.Join("/", c.WorkingDir),
	}
	for text := range c.ExposedPorts {
		port, err := parsePort(text)
		if err != nil {
			return Config{}, err
		}
		out.ExposedPorts = append(out.ExposedPorts, port)
	}
	slices.SortFunc(out.ExposedPorts, func(a, b Port) int {
		if a.Number != b.Number {
			return int(a.Number) - int(b.Number)
		}
		return strings.Compare(a.Protocol, b.Protocol)
	})
	for v := range c.Volumes {
		if !path.IsAbs(v) || strings.ContainsRune(v, 0) {
			return Config{}, errdefs.New(errdefs.Invalid, "the config's volume %.100q is no absolute path", v)
		}
		out.Volumes = append(out.Volumes, path.Clean(v))
	}
	slices.Sort(out.Volumes)
	return out, nil
}

// parsePort reads "80", "80/tcp", "53/udp".
func parsePort(text string) (Port, error) {
	number, protocol, ok := strings.Cut(text, "/")
	if !ok {
		protocol = "tcp"
	}
	n, err := strconv.ParseUint(number, 10, 16)
	if err != nil || n == 0 || !slices.Contains([]string{"tcp", "udp", "sctp"}, protocol) {
		return Port{}, errdefs.New(errdefs.Invalid, "the config's port %.100q is none", text)
	}
	return Port{uint16(n), protocol}, nil
}
