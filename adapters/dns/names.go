package dns

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"sigs.k8s.io/yaml"
)

const (
	// maxFileBytes bounds the file of names.
	maxFileBytes = 16 << 20
	// quiet is how long the file must not have changed to be read.
	quiet = 200 * time.Millisecond
	// recheck is how often what cannot be watched is read again.
	recheck = 10 * time.Second
)

// file is a file of names.
type file struct {
	path    string
	others  []Name // of the configuration
	watcher *fsnotify.Watcher
	content []byte // as last read
	read    bool
}

// watch begins to watch the file. Without a watcher it is read every now and
// then.
func (f *file) watch() { f.watcher, _ = fsnotify.NewWatcher() }

func (f *file) close() {
	if f.watcher != nil {
		f.watcher.Close()
	}
}

// events is nil, and so never ready, if nothing can be watched.
func (f *file) events() <-chan fsnotify.Event {
	if f.watcher == nil {
		return nil
	}
	return f.watcher.Events
}

// names reads the file. changed is false if it is as it was.
func (f *file) names() (names []Name, changed bool, err error) {
	if f.watcher != nil {
		// Folders are watched, as files are replaced, in a mounted ConfigMap by
		// a link. One that cannot be is read every now and then.
		_ = f.watcher.Add(filepath.Dir(f.path))
		if target, err := filepath.EvalSymlinks(f.path); err == nil {
			_ = f.watcher.Add(filepath.Dir(target))
		}
	}
	open, err := os.Open(f.path)
	if err != nil {
		return nil, false, err
	}
	defer open.Close()
	b, err := io.ReadAll(io.LimitReader(open, maxFileBytes+1))
	if err != nil {
		return nil, false, err
	}
	if f.read && bytes.Equal(b, f.content) {
		return nil, false, nil
	}
	if names, err = parseNames(b); err == nil {
		err = errors.Join(checkNames("names", f.others, names)...)
	}
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", f.path, err)
	}
	f.content, f.read = b, true
	return names, true, nil
}

// parseNames parses the content of a file.
func parseNames(b []byte) ([]Name, error) {
	if len(b) > maxFileBytes {
		return nil, fmt.Errorf("it has more than %d MiB", maxFileBytes>>20)
	}
	b, err := yaml.YAMLToJSONStrict(b)
	if err != nil {
		return nil, err
	}
	if bytes.Equal(bytes.TrimSpace(b), []byte("null")) {
		return nil, errors.New("it is empty; write [] for no names")
	}
	var names []Name
	if err := json.Unmarshal(b, &names); err != nil {
		return nil, fmt.Errorf("it is not a list of names: %w", err)
	}
	return names, nil
}
