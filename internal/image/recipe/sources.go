package recipe

import (
	"bufio"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
)

// source is one entry of apt's sources: one URI with one suite
// (sources.list(5)).
type source struct {
	uri, suite string
	components []string
	options    map[string]string
}

// line is the entry in apt's one-line form.
func (s source) line() string {
	var options []string
	for name, value := range s.options {
		options = append(options, name+"="+value)
	}
	slices.Sort(options)
	list := ""
	if len(options) > 0 {
		list = "[" + strings.Join(options, " ") + "] "
	}
	return "deb " + list + s.uri + " " + s.suite + " " + strings.Join(s.components, " ")
}

// keptOptions are the options of an entry that say how to reach and trust it.
func keptOptions() []string {
	return []string{"signed-by", "trusted", "check-valid-until", "valid-until-max", "valid-until-min", "check-date", "date-max-future"}
}

// hostSources returns the entries of the host's apt configuration, below
// etc (/etc as a file system), from which suite can be installed, as lines.
// A host of another Debian release has mirrors that carry suite too: its own
// release's name, codename, is replaced. Only entries of Debian itself count,
// told by their keyring; none means that the host knows no Debian mirror, and
// mmdebstrap knows one.
func hostSources(etc fs.FS, suite, codename string) ([]string, error) {
	all, err := readSources(etc)
	if err != nil {
		return nil, err
	}
	pick := func(name string) []string {
		var lines []string
		for _, s := range all {
			rest, ok := strings.CutPrefix(s.suite, name)
			if !ok || !slices.Contains([]string{"", "-updates", "-security"}, rest) || !s.ofDebian() {
				continue
			}
			s.suite = suite + rest
			lines = append(lines, s.line())
		}
		return lines
	}
	lines := pick(suite)
	if len(lines) == 0 && codename != "" {
		lines = pick(codename)
	}
	slices.Sort(lines)
	return slices.Compact(lines), nil
}

// ofDebian reports whether the entry is a network mirror of Debian's own
// archive.
func (s source) ofDebian() bool {
	network := strings.HasPrefix(s.uri, "http://") || strings.HasPrefix(s.uri, "https://")
	key, signed := s.options["signed-by"]
	return network && slices.Contains(s.components, "main") && (!signed || strings.Contains(key, "/debian-archive-"))
}

// readSources reads apt/sources.list and apt/sources.list.d in the order in
// which apt does. A folder that is not there has no sources.
func readSources(etc fs.FS) ([]source, error) {
	paths := []string{"apt/sources.list"}
	found, err := fs.Glob(etc, "apt/sources.list.d/*")
	if err != nil {
		return nil, fmt.Errorf("list the host's apt sources: %w", err)
	}
	var all []source
	for _, path := range append(paths, found...) {
		data, err := fs.ReadFile(etc, path)
		switch {
		case err != nil:
			// What this user may not read is no source for this user's build.
			continue
		case strings.HasSuffix(path, ".sources"):
			all = append(all, parseStanzas(string(data))...)
		case strings.HasSuffix(path, ".list"):
			all = append(all, parseLines(string(data))...)
		}
	}
	return all, nil
}

// parseLines reads apt's one-line form. What it cannot read it leaves out.
func parseLines(data string) []source {
	var all []source
	for line := range strings.Lines(data) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}
		options := map[string]string{}
		rest = strings.TrimSpace(rest)
		if strings.HasPrefix(rest, "[") {
			list, after, ok := strings.Cut(rest[1:], "]")
			if !ok {
				continue
			}
			rest = after
			for _, option := range strings.Fields(list) {
				name, value, _ := strings.Cut(option, "=")
				if slices.Contains(keptOptions(), strings.ToLower(name)) {
					options[strings.ToLower(name)] = value
				}
			}
		}
		fields := strings.Fields(rest)
		if len(fields) < 3 {
			continue
		}
		all = append(all, source{uri: fields[0], suite: fields[1], components: fields[2:], options: options})
	}
	return all
}

// parseStanzas reads apt's deb822 form. A key that is embedded in the entry
// cannot be named in a line: such an entry is left out.
func parseStanzas(data string) []source {
	var all []source
	for stanza := range strings.SplitSeq(strings.ReplaceAll(data, "\r\n", "\n")+"\n", "\n\n") {
		fields := parseFields(stanza)
		if !slices.Contains(strings.Fields(fields["types"]), "deb") || strings.EqualFold(fields["enabled"], "no") {
			continue
		}
		options := map[string]string{}
		for _, name := range keptOptions() {
			if value, ok := fields[name]; ok {
				options[name] = strings.Join(strings.Fields(value), ",")
			}
		}
		if strings.Contains(options["signed-by"], "PGP") {
			continue
		}
		for _, uri := range strings.Fields(fields["uris"]) {
			for _, suite := range strings.Fields(fields["suites"]) {
				all = append(all, source{uri: uri, suite: suite, components: strings.Fields(fields["components"]), options: options})
			}
		}
	}
	return all
}

// parseFields reads the fields of one stanza; names become lower case.
func parseFields(stanza string) map[string]string {
	fields := map[string]string{}
	last := ""
	for line := range strings.Lines(stanza) {
		line = strings.TrimRight(line, "\n")
		switch {
		case strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "":
		case line[0] == ' ' || line[0] == '\t':
			fields[last] += "\n" + line
		default:
			name, value, _ := strings.Cut(line, ":")
			last = strings.ToLower(strings.TrimSpace(name))
			fields[last] = strings.TrimSpace(value)
		}
	}
	return fields
}

// aptOption matches the host's apt settings that say how to reach a mirror and
// how far to believe its dates; everything else is the host's own affair.
var aptOption = regexp.MustCompile(`^Acquire::((http|https)::.+|Check-Valid-Until|Check-Date|Max-FutureTime|Retries|ForceIPv[46]) ".+";$`)

// hostOptions picks those settings from the output of apt-config dump.
func hostOptions(dump string) []string {
	var options []string
	scanner := bufio.NewScanner(strings.NewReader(dump))
	for scanner.Scan() {
		if line := strings.TrimSpace(scanner.Text()); aptOption.MatchString(line) {
			options = append(options, line)
		}
	}
	return options
}

// hostCodename is the name of the host's release in the text of os-release,
// when the host is Debian itself.
func hostCodename(osRelease string) string {
	id, codename := "", ""
	for line := range strings.Lines(osRelease) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch name {
		case "ID":
			id = strings.Trim(value, `"'`)
		case "VERSION_CODENAME":
			codename = strings.Trim(value, `"'`)
		}
	}
	if id != "debian" {
		return ""
	}
	return codename
}
