package file

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/fsnotify/fsnotify"
)

// watcher reports that something may have changed. Failing to watch a directory
// is no error: the regular listing finds its changes later.
type watcher struct {
	w    *fsnotify.Watcher // nil if watching is not available
	err  error             // why w is nil
	dirs map[string]watched
}

// watched is one watched directory.
type watched struct {
	info  fs.FileInfo            // of the directory when it was first watched
	about func(name string) bool // reports whether a name in it matters
}

func newWatcher() *watcher {
	w, err := fsnotify.NewWatcher()
	return &watcher{w: w, err: err, dirs: map[string]watched{}}
}

func (w *watcher) close() {
	if w.w != nil {
		_ = w.w.Close()
	}
}

// events and errors are nil, and so never ready, if nothing can be watched.

func (w *watcher) events() <-chan fsnotify.Event {
	if w.w == nil {
		return nil
	}
	return w.w.Events
}

func (w *watcher) errors() <-chan error {
	if w.w == nil {
		return nil
	}
	return w.w.Errors
}

// set changes the watched directories to those of want, each with the names
// that matter there. began reports that a watch was added, so changes just
// before may be unseen. problems are the directories that cannot be watched, as
// reasons by problem id.
func (w *watcher) set(want map[string]func(name string) bool) (began bool, problems map[string]string) {
	problems = map[string]string{}
	if w.w == nil {
		problems["watch"] = fmt.Sprintf("changes are not reported, but only found every %v: %v; raise fs.inotify.max_user_instances", rescan, w.err)
		return false, problems
	}
	active := w.w.WatchList()
	for dir := range w.dirs {
		if _, wanted := want[dir]; !wanted {
			_ = w.w.Remove(dir) // the watch may have ended with the directory
			delete(w.dirs, dir)
		}
	}
	for dir, about := range want {
		info, err := os.Stat(dir)
		if err != nil { // removed just now, or missing; reading it reports that
			if _, was := w.dirs[dir]; was {
				_ = w.w.Remove(dir)
				delete(w.dirs, dir)
			}
			continue
		}
		if d, was := w.dirs[dir]; was {
			if os.SameFile(d.info, info) && slices.Contains(active, dir) {
				w.dirs[dir] = watched{d.info, about}
				continue
			}
			_ = w.w.Remove(dir) // the watched directory is no longer at this path
			delete(w.dirs, dir)
		}
		if err := w.w.Add(dir); err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				problems["watch "+dir] = fmt.Sprintf(
					"changes in the directory are not reported, but only found every %v: %v; let the bridge read it, or raise fs.inotify.max_user_watches", rescan, err)
			}
			continue
		}
		w.dirs[dir] = watched{info, about}
		began = true
	}
	return began, problems
}

// concerns reports whether an event is about a name that matters.
func (w *watcher) concerns(ev fsnotify.Event) bool {
	if _, is := w.dirs[ev.Name]; is {
		return true
	}
	d, is := w.dirs[filepath.Dir(ev.Name)]
	return is && d.about(filepath.Base(ev.Name))
}

// wanted returns the directories to watch for a path, with the names that
// matter in each, given the last listing or a zero one.
func wanted(path string, l listing) map[string]func(name string) bool {
	all := map[string]func(string) bool{}
	add := func(dir string, about func(string) bool) {
		// A directory has one watch, even if several links lead to it.
		if target, err := filepath.EvalSymlinks(dir); err == nil {
			dir = target
		}
		if before := all[dir]; before != nil {
			all[dir] = func(name string) bool { return before(name) || about(name) }
			return
		}
		all[dir] = about
	}
	// The path itself may be replaced, or contain a link that is.
	add(filepath.Dir(path), func(name string) bool { return name == filepath.Base(path) || isData(name) })
	switch {
	case l.only != "":
		add(l.dir, func(name string) bool { return name == l.only || isData(name) })
	default:
		add(path, func(name string) bool { return counts(name) || isData(name) })
	}
	for _, dir := range l.links {
		add(dir, func(string) bool { return true })
	}
	return all
}

// isData reports whether name is one by which Kubernetes swaps the content of a
// mounted ConfigMap ("..data").
func isData(name string) bool { return strings.HasPrefix(name, "..") }
