package file

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// maxSize is the maximal size of a file, in bytes.
const maxSize = 16 << 20

// errReplaced means that the directory was replaced while it was read.
var errReplaced = errors.New("the directory was replaced while it was read")

// tree holds the last good content of each file and its present error. It is
// not safe for concurrent use.
type tree struct {
	path      string // absolute
	namespace string // of Istio resources without one

	files map[string]*file // by name within the directory
}

// file is one existing file.
type file struct {
	sum  [sha256.Size]byte // of the content that was last read
	read bool              // sum is valid
	good *content          // last good content; nil if there was none
	err  error             // nil if the file is valid
}

// listing is the result of reading the tree once.
type listing struct {
	// dir is the directory that was read. If only is not "", it is the one file
	// in it that is read.
	dir, only string
	// links are the directories, outside or below dir, with targets of symbolic
	// links in dir.
	links []string
}

// refresh reads changed files. The error is that the directory, or the one
// file, cannot be read; the tree is unchanged then. Errors of single files of a
// directory are in tree.files.
func (t *tree) refresh() (listing, error) {
	info, err := os.Stat(t.path)
	if err != nil {
		return listing{}, err
	}
	l := listing{dir: t.path}
	if !info.IsDir() {
		// If the operator names a file, a link may point anywhere.
		target, err := filepath.EvalSymlinks(t.path)
		if err != nil {
			return listing{}, err
		}
		l.dir, l.only = filepath.Dir(target), filepath.Base(target)
	}
	root, err := os.OpenRoot(l.dir)
	if err != nil {
		return listing{}, err
	}
	defer root.Close()

	names := []string{l.only}
	if l.only == "" {
		if names, err = t.list(root, &l); err != nil {
			return listing{}, err
		}
	}
	files := make(map[string]*file, len(names))
	for _, name := range names {
		if f, there := t.readFile(root, name); there {
			files[name] = f
		}
	}
	if _, there := files[l.only]; l.only != "" && !there {
		return listing{}, &fs.PathError{Op: "open", Path: t.path, Err: fs.ErrNotExist}
	}

	// A directory that is being deleted lists fewer and fewer files. The
	// listing is used only if the directory is still at the path.
	if l.only == "" {
		now, err := os.Stat(t.path)
		if err != nil {
			return listing{}, err
		}
		if was, err := root.Stat("."); err != nil || !os.SameFile(was, now) {
			return listing{}, errReplaced
		}
	}
	t.files = files
	return l, nil
}

// list returns the names of the files to read, and records the targets of
// links.
func (t *tree) list(root *os.Root, l *listing) ([]string, error) {
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !counts(e.Name()) || e.IsDir() {
			continue
		}
		if e.Type()&fs.ModeSymlink != 0 {
			// The target is watched; root keeps it within the directory.
			if target, err := filepath.EvalSymlinks(filepath.Join(l.dir, e.Name())); err == nil {
				if dir := filepath.Dir(target); dir != l.dir && !slices.Contains(l.links, dir) {
					l.links = append(l.links, dir)
				}
			}
		}
		names = append(names, e.Name())
	}
	return names, nil
}

// counts reports whether a file of that name is read.
func counts(name string) bool {
	ext := filepath.Ext(name)
	return (ext == ".yaml" || ext == ".yml") && !strings.HasPrefix(name, ".")
}

// readFile reads a file. there is false if it was removed after it was listed,
// or is a directory.
func (t *tree) readFile(root *os.Root, name string) (f *file, there bool) {
	f = &file{}
	if old := t.files[name]; old != nil {
		*f = *old
	}
	data, err := readAll(root, name)
	if errors.Is(err, errDirectory) {
		return nil, false
	}
	if err != nil {
		if _, lerr := root.Lstat(name); errors.Is(lerr, fs.ErrNotExist) {
			return nil, false
		}
		f.err, f.read = err, false
		return f, true
	}
	sum := sha256.Sum256(data)
	if f.read && f.sum == sum {
		return f, true
	}
	f.sum, f.read = sum, true
	if c, err := parse(data, t.namespace); err != nil {
		f.err = err
	} else {
		f.good, f.err = c, nil
	}
	return f, true
}

var (
	errDirectory  = errors.New("is a directory")
	errNotRegular = errors.New("is not a regular file")
	errTooLarge   = fmt.Errorf("is larger than %d MiB; split it", maxSize>>20)
)

func readAll(root *os.Root, name string) ([]byte, error) {
	// Opening a named pipe would block until it has a writer.
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if info, lerr := root.Lstat(name); lerr == nil && info.Mode()&fs.ModeSymlink != 0 {
			return nil, fmt.Errorf("%w (a link must lead to a file within the directory)", err)
		}
		return nil, err
	}
	defer f.Close()
	switch info, err := f.Stat(); {
	case err != nil:
		return nil, err
	case info.IsDir():
		return nil, errDirectory
	case !info.Mode().IsRegular():
		return nil, errNotRegular
	case info.Size() > maxSize:
		return nil, errTooLarge
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err == nil && len(data) > maxSize {
		err = errTooLarge
	}
	return data, err
}

// state is the content of all files.
type state struct {
	services  map[registry.Key]*service
	resources map[resourceID]*resource
	problems  map[string]string // reasons by id
	// The same in the order of the files and of their content.
	serviceOrder  []*service
	resourceOrder []*resource
}

// merge merges the content of the files. If several define an item, the file
// whose name sorts first wins.
func (t *tree) merge() *state {
	s := &state{
		services:  map[registry.Key]*service{},
		resources: map[resourceID]*resource{},
		problems:  map[string]string{},
	}
	var (
		serviceFiles  = map[registry.Key]string{}
		resourceFiles = map[resourceID]string{}
	)
	duplicate := func(what, first string, firstLine int, second string, secondLine int) {
		s.problems[fmt.Sprintf("%s in %s", what, second)] = fmt.Sprintf(
			"defined in %s:%d and in %s:%d; the one in %s is used, since that name sorts first; remove one of them",
			first, firstLine, second, secondLine, first)
	}
	for _, name := range t.names() {
		f := t.files[name]
		if f.err != nil {
			s.problems["file "+name] = f.reason(name)
		}
		if f.good == nil {
			continue
		}
		for _, svc := range f.good.services {
			if first := s.services[svc.Key]; first != nil {
				duplicate("service "+svc.Key.String(), serviceFiles[svc.Key], first.line, name, svc.line)
				continue
			}
			s.services[svc.Key], serviceFiles[svc.Key] = svc, name
			s.serviceOrder = append(s.serviceOrder, svc)
		}
		for _, res := range f.good.resources {
			if first := s.resources[res.id]; first != nil {
				duplicate("resource "+res.id.collection+" "+res.id.name, resourceFiles[res.id], first.line, name, res.line)
				continue
			}
			s.resources[res.id], resourceFiles[res.id] = res, name
			s.resourceOrder = append(s.resourceOrder, res)
		}
	}
	return s
}

// unread returns the names of the files without a good version.
func (t *tree) unread() (names []string) {
	for _, name := range t.names() {
		if t.files[name].good == nil {
			names = append(names, name)
		}
	}
	return names
}

func (t *tree) names() []string {
	names := make([]string, 0, len(t.files))
	for name := range t.files {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// reason describes the error of a file, and what is served instead.
func (f *file) reason(name string) string {
	text := name + ": "
	if b, ok := errors.AsType[*broken](f.err); ok {
		text = b.in(name)
	} else {
		text += f.err.Error()
	}
	if f.good != nil {
		return text + "; the last good content is kept"
	}
	return text + "; nothing of the file is served until it is corrected"
}
