package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/isthmus-mesh/isthmus/internal/hangup"
	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// Triggers of a reload, for logs.
const (
	triggerSignal = "SIGHUP"
	triggerFile   = "file"
)

// reloadWhenTold reloads the configuration of the server on SIGHUP and when the
// content of its file changes, until ctx ends and stop is called. The server
// reports the outcome. The hash is that of the content that the server was
// created with.
func reloadWhenTold(ctx context.Context, s *server.Server, hash, file string, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	// The caller owns both goroutines; stop ends them.
	all.Go(func() {
		for {
			select {
			case <-hangup.Signals:
				_, _ = s.Reload(ctx, triggerSignal)
			case <-ctx.Done():
				return
			}
		}
	})
	all.Go(func() {
		w := &fileWatch{file: file, hash: hash, log: log}
		w.run(ctx, func() { _, _ = s.Reload(ctx, triggerFile) })
	})
	return func() {
		cancel()
		all.Wait()
	}
}

// Timing of the watch of a file.
const (
	// settleFor is the time without changes after which a file is read, so that
	// it is read whole.
	settleFor = 250 * time.Millisecond
	// lookEvery is the interval at which the file is read without a reported
	// change, for file systems that report none.
	lookEvery = 30 * time.Second
)

// fileWatch reports changes of the content of a file.
type fileWatch struct {
	file string
	hash string // of the content reported last
	log  *slog.Logger

	w    *fsnotify.Watcher // nil if watching is not available
	dirs []string          // watched ones
}

// run calls changed whenever the content differs from the last, until ctx ends.
func (f *fileWatch) run(ctx context.Context, changed func()) {
	var events chan fsnotify.Event
	var errs chan error
	if w, err := fsnotify.NewWatcher(); err != nil {
		f.log.Warn("the system does not report changes of the configuration file; it is looked at again and again", "every", lookEvery, "err", err)
	} else {
		defer w.Close()
		f.w, events, errs = w, w.Events, w.Errors
	}
	f.watch()
	look := time.NewTimer(0) // the file may have changed since it was read
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-events:
			if f.concerns(e.Name) {
				look.Reset(settleFor)
			}
			continue
		case err := <-errs: // events were lost
			f.log.Debug("watching the configuration file", "err", err)
			look.Reset(settleFor)
			continue
		case <-look.C:
		}
		f.watch()
		if hash := hashOf(f.file); hash != f.hash {
			f.hash = hash
			changed()
		}
		look.Reset(lookEvery)
	}
}

// watch watches the directory of the file and, if the file is a link, that of
// its target. Kubernetes replaces a link in the first when a ConfigMap changes.
func (f *fileWatch) watch() {
	if f.w == nil {
		return
	}
	f.dirs = []string{filepath.Dir(f.file)}
	if target, err := filepath.EvalSymlinks(f.file); err == nil && filepath.Dir(target) != f.dirs[0] {
		f.dirs = append(f.dirs, filepath.Dir(target))
	}
	wanted := make(map[string]bool)
	for _, dir := range f.dirs {
		wanted[filepath.Clean(dir)] = true
		// Watched directories stay watched; recreated ones are added.
		_ = f.w.Add(dir)
	}
	for _, dir := range f.w.WatchList() {
		if !wanted[filepath.Clean(dir)] {
			_ = f.w.Remove(dir)
		}
	}
}

// concerns reports whether an event at a path may have changed the file.
func (f *fileWatch) concerns(path string) bool {
	name := filepath.Base(path)
	if name == filepath.Base(f.file) || strings.HasPrefix(name, "..") {
		return true
	}
	target, err := filepath.EvalSymlinks(f.file)
	return err == nil && name == filepath.Base(target)
}

// hashOf returns the SHA-256 of a file, "" if it cannot be read.
func hashOf(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, io.LimitReader(f, config.MaxSize+1)); err != nil {
		return ""
	}
	return hex.EncodeToString(sum.Sum(nil))
}
