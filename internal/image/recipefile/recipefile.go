// Package recipefile reads the text in which people say what image to build, and
// the files that it names. It builds nothing.
//
// The text has a key and its words on each line; words are separated by blanks,
// and one with blanks in it is between double quotes. Empty lines, and those that
// begin with #, are for people.
//
//	packages NAME...
//	user     NAME
//	file     SOURCE DESTINATION [owner=USER[:GROUP]] [mode=OCTAL]
//	script   SOURCE
//	size     NUMBER(M|G|T)
//
// SOURCE is relative to the folder of the recipe, and cannot lead out of it.
package recipefile

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/holdpoint/holdpoint/internal/errdefs"
	"github.com/holdpoint/holdpoint/internal/image/recipe"
)

// Limits, in bytes and lines.
const (
	maxText   = 1 << 20
	maxScript = 1 << 20
	maxLines  = 10_000
)

// Recipe is what a text says.
type Recipe struct {
	// Packages are as they are there.
	Packages []string
	// User is created; empty for none.
	User string
	// Script is the content of the script; empty for none.
	Script string
	// DiskBytes is the disk's size; 0 where the text says none.
	DiskBytes int64
	// Files are those to copy; nil for none.
	Files *Files
}

var (
	userPattern = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,30}$`)
	sizePattern = regexp.MustCompile(`^([0-9]{1,7})([MGT])$`)
	idsPattern  = regexp.MustCompile(`^([0-9]{1,10})(?::([0-9]{1,10}))?$`)
	modePattern = regexp.MustCompile(`^[0-7]{3,4}$`)
)

// Read reads the recipe in the file, and its script. A missing one is NOT_FOUND,
// what it may not say INVALID with the number of the line.
func Read(name string) (Recipe, error) {
	dir, base := filepath.Split(name)
	root, err := os.OpenRoot(filepath.Clean(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return Recipe{}, errdefs.New(errdefs.NotFound, "recipe %s: there is no such file", name)
	}
	if err != nil {
		return Recipe{}, errdefs.New(errdefs.Invalid, "recipe %s: %w", name, err)
	}
	defer root.Close()
	text, err := readText(root, base, maxText)
	if err != nil {
		return Recipe{}, errdefs.New(errdefs.KindOf(err), "recipe %s: %w", name, err)
	}
	r := reader{root: root, seen: map[string]bool{}, files: &Files{dir: filepath.Clean(dir)}}
	number := 0
	for line := range strings.Lines(text) {
		if number++; number > maxLines {
			return Recipe{}, errdefs.New(errdefs.Invalid, "recipe %s: it has more than %d lines", name, maxLines)
		}
		if err := r.line(strings.TrimSpace(line)); err != nil {
			return Recipe{}, errdefs.New(errdefs.KindOf(err), "recipe %s, line %d: %w", name, number, err)
		}
	}
	if err := r.owners(); err != nil {
		return Recipe{}, errdefs.New(errdefs.Invalid, "recipe %s, %w", name, err)
	}
	return r.out, nil
}

// readText reads a regular file below root.
func readText(root *os.Root, name string, limit int64) (string, error) {
	f, err := open(root, name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	switch {
	case err != nil:
		return "", errdefs.New(errdefs.Storage, "read %s: %w", name, err)
	case int64(len(data)) > limit:
		return "", errdefs.New(errdefs.Invalid, "%s is longer than %d bytes", name, limit)
	case !utf8.Valid(data):
		return "", errdefs.New(errdefs.Invalid, "%s is not UTF-8", name)
	}
	return string(data), nil
}

// reader reads line after line.
type reader struct {
	root  *os.Root
	out   Recipe
	files *Files
	seen  map[string]bool
	count int
}

func (r *reader) line(text string) error {
	r.count++
	if text == "" || text[0] == '#' {
		return nil
	}
	words, err := split(text)
	if err != nil {
		return err
	}
	key, words := words[0], words[1:]
	read, want := r.key(key)
	switch {
	case read == nil:
		return errdefs.New(errdefs.Invalid, "unknown key %q; there are packages, user, file, script and size", key)
	case len(words) == 0 || want == 1 && len(words) > 1:
		return errdefs.New(errdefs.Invalid, "%s: give %s", key, usage(key))
	case want == 1 && r.seen[key]:
		return errdefs.New(errdefs.Invalid, "%s is there already", key)
	}
	r.seen[key] = true
	return read(words)
}

// key gives what reads the words of a key, and how many they are; 0 for any
// number of them, on any number of lines.
func (r *reader) key(key string) (read func([]string) error, want int) {
	switch key {
	case "packages":
		return r.packages, 0
	case "file":
		return r.file, 0
	case "user":
		return r.user, 1
	case "script":
		return r.script, 1
	case "size":
		return r.size, 1
	}
	return nil, 0
}

func usage(key string) string {
	switch key {
	case "packages":
		return "names of Debian packages"
	case "file":
		return "SOURCE DESTINATION [owner=USER[:GROUP]] [mode=OCTAL]"
	case "user":
		return "one name"
	case "script":
		return "the name of one file"
	}
	return "one size, such as 4G"
}

func (r *reader) packages(words []string) error {
	if err := recipe.CheckPackages(words); err != nil {
		return err
	}
	r.out.Packages = append(r.out.Packages, words...)
	return nil
}

func (r *reader) user(words []string) error {
	if name := words[0]; !userPattern.MatchString(name) || name == "root" {
		return errdefs.New(errdefs.Invalid, "user %q: use 1 to 31 of a-z, 0-9, _ and -, beginning with a letter, and not root", name)
	}
	r.out.User = words[0]
	return nil
}

func (r *reader) script(words []string) (err error) {
	r.out.Script, err = readText(r.root, words[0], maxScript)
	if err == nil && r.out.Script == "" {
		err = errdefs.New(errdefs.Invalid, "script %s: it is empty", words[0])
	}
	return err
}

func (r *reader) size(words []string) error {
	m := sizePattern.FindStringSubmatch(words[0])
	if m == nil {
		return errdefs.New(errdefs.Invalid, "size %q: give a number and M, G or T, such as 4G", words[0])
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n == 0 {
		return errdefs.New(errdefs.Invalid, "size %q: give a number and M, G or T, such as 4G", words[0])
	}
	r.out.DiskBytes = n << (20 + 10*strings.Index("MGT", m[2]))
	return nil
}

func (r *reader) file(words []string) error {
	if len(words) < 2 {
		return errdefs.New(errdefs.Invalid, "file: give %s", usage("file"))
	}
	f := file{line: r.count, source: words[0], owner: "root"}
	f.path = path.Clean(words[1])
	if !path.IsAbs(words[1]) || f.path == "/" {
		return errdefs.New(errdefs.Invalid, "file %s: the destination %q is no absolute path below /", f.source, words[1])
	}
	for _, word := range words[2:] {
		key, value, _ := strings.Cut(word, "=")
		switch {
		case key == "owner" && value != "":
			f.owner = value
		case key == "mode" && modePattern.MatchString(value):
			mode, _ := strconv.ParseInt(value, 8, 64) // it matches
			f.mode = &mode
		case key == "mode":
			return errdefs.New(errdefs.Invalid, "file %s: the mode %q is none, such as 0644", f.source, value)
		default:
			return errdefs.New(errdefs.Invalid, "file %s: unknown %q; there are owner=USER[:GROUP] and mode=OCTAL", f.source, word)
		}
	}
	opened, err := open(r.root, f.source)
	if err != nil {
		return err
	}
	defer opened.Close()
	if info, err := opened.Stat(); err != nil || info.IsDir() && f.mode != nil {
		return errdefs.New(errdefs.Invalid, "file %s: it is a folder, whose files keep being executable or not; leave mode out", f.source)
	}
	r.files.list = append(r.files.list, f)
	r.out.Files = r.files
	return nil
}

// owners finds the numbers of all owners, when the user is known.
func (r *reader) owners() error {
	for i := range r.files.list {
		f := &r.files.list[i]
		switch ids := idsPattern.FindStringSubmatch(f.owner); {
		case f.owner == "root":
		case r.out.User != "" && f.owner == r.out.User:
			f.uid, f.gid = recipe.UserID, recipe.UserID
		case ids != nil:
			uid, err := strconv.ParseUint(ids[1], 10, 31)
			gid, err2 := strconv.ParseUint(ids[2], 10, 31)
			if ids[2] == "" {
				gid, err2 = uid, nil
			}
			if f.uid, f.gid = int(uid), int(gid); err == nil && err2 == nil {
				continue
			}
			fallthrough
		default:
			return errdefs.New(errdefs.Invalid, "line %d: file %s: the owner %q is neither root nor the recipe's user nor a number", f.line, f.source, f.owner)
		}
	}
	return nil
}

// split splits a line into words, at least one.
func split(line string) ([]string, error) {
	var words []string
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimLeftFunc(line, unicode.IsSpace) {
		end := strings.IndexFunc(line, unicode.IsSpace)
		if end < 0 {
			end = len(line)
		}
		word := line[:end]
		if rest, quoted := strings.CutPrefix(line, `"`); quoted {
			i := strings.IndexByte(rest, '"')
			if i < 0 {
				return nil, errdefs.New(errdefs.Invalid, "a quoted word has no end")
			}
			word, end = rest[:i], i+2
		}
		if word == "" || strings.ContainsFunc(word, unicode.IsControl) {
			return nil, errdefs.New(errdefs.Invalid, "a word is empty or has a control character in it")
		}
		words, line = append(words, word), line[end:]
	}
	return words, nil
}
