package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// session follows a cluster with one client.
type session struct {
	*run
	client *client
	check  chan struct{} // of capacity one: look at the kubeconfig now

	mu sync.Mutex // guards the fields below, the follower, the feeds and the order of takes
	follower
	take  func(plugin.Listing)
	feeds []*feed
	away  string // why something cannot be followed, "" if all is
	lost  error  // why data may be lost, until it is told
	told  bool   // there was a complete listing
	doubt bool   // in the latest one
}

// session lists and watches the sources of a follower until ctx ends, or there
// is reason to begin anew.
func (r *run) session(ctx context.Context, k *cluster, c *client, f follower, take func(plugin.Listing)) error {
	ctx, cancel := context.WithCancel(ctx)
	s := &session{run: r, client: c, check: make(chan struct{}, 1), follower: f, take: take}
	for _, source := range f.sources() {
		s.feeds = append(s.feeds, &feed{source: source, session: s})
	}
	var watches sync.WaitGroup
	defer watches.Wait()
	defer cancel()
	if len(s.feeds) == 0 {
		s.mu.Lock()
		s.listedLocked()
		s.mu.Unlock()
	}
	for _, f := range s.feeds {
		from := &cache.ListWatch{ListWithContextFunc: f.list, WatchFuncWithContext: f.open}
		reflector := cache.NewReflectorWithOptions(from, &object{}, f, cache.ReflectorOptions{
			Name: f.path, Logger: new(klog.Logger), Clock: ending{ctx: ctx},
			Backoff: &wait.Backoff{Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 10, Cap: 15 * time.Second},
		})
		reflector.WatchListPageSize = pageObjects
		// Owned by session; ends with ctx.
		watches.Go(func() { reflector.RunWithContext(ctx) })
	}
	again := time.NewTicker(r.rediscover)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.check:
		case <-again.C:
		}
		now, err := r.config.cluster()
		if err != nil {
			return err
		}
		if !bytes.Equal(now.text, k.text) {
			r.log.Info("the kubeconfig has changed; everything is listed again")
			return nil
		}
		s.calm()
		found, err := r.discover(ctx, c)
		if err != nil {
			continue // the feeds say so
		}
		if !slices.Equal(found, f.sources()) {
			r.log.Info("the kinds of the cluster have changed; everything is listed again", slog.Int("kinds", len(found)))
			return nil
		}
	}
}

// ending is the time of a session, whose waits end with it. Those of the
// library do not all.
type ending struct {
	clock.RealClock

	ctx context.Context //nolint:containedctx // the interface has none
}

// After implements clock.Clock.
func (e ending) After(d time.Duration) <-chan time.Time {
	done := make(chan time.Time, 2)
	stop := context.AfterFunc(e.ctx, func() { done <- time.Now() })
	time.AfterFunc(d, func() {
		stop()
		done <- time.Now()
	})
	return done
}

// feed is a source of a session: it asks the server for what the library wants,
// and is the store of what that finds, cache.ReflectorStore.
type feed struct {
	source
	session *session

	// guarded by session.mu
	names    map[name]bool // listed, nil before the first listing
	revision string
	fault    error // why it cannot be followed
	// The latest watch, and how many ended at once, one after the other.
	opened time.Time // zero if its end was judged
	stop   func()
	brief  int
}

const (
	// atOnce is the time within which no server ends a watch, and mostBrief the
	// number of such ends, one after the other, that is a fault.
	atOnce    = time.Second
	mostBrief = 3
)

// list returns a page of a listing, of which only what counts is kept.
func (f *feed) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	p, err := f.session.client.list(ctx, f.source, options)
	if err != nil {
		f.failed(ctx, err)
		return nil, err
	}
	for i := range p.Items {
		f.session.read(f.kind, &p.Items[i])
	}
	return p, nil
}

// open opens a watch, which goes on at the revision of the one before, in
// whatever way that ended. After a failure the resource is listed again, as the
// server may have been restored meanwhile.
func (f *feed) open(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	lists := options.SendInitialEvents != nil
	if f.unsure() && !lists {
		return nil, apierrors.NewResourceExpired("it is listed again after a failure")
	}
	w, err := f.session.client.watch(ctx, f.source, options)
	switch {
	case lists && (apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)):
		return nil, err // the server cannot list by a watch
	case err != nil:
		f.failed(ctx, err)
		return nil, err
	}
	f.session.mu.Lock()
	defer f.session.mu.Unlock()
	f.opened, f.stop = time.Now(), w.Stop
	if !lists {
		f.followedLocked()
		f.session.heardLocked()
	}
	return w, nil
}

// unsure judges the end of the latest watch, and reports whether changes may
// have been missed since.
func (f *feed) unsure() bool {
	f.session.mu.Lock()
	defer f.session.mu.Unlock()
	switch lasted := time.Since(f.opened); {
	case f.opened.IsZero(): // never, or judged
	case lasted >= atOnce:
		f.brief = 0
	default:
		if f.brief++; f.brief >= mostBrief {
			f.faultLocked(fmt.Errorf("the server, or a proxy before it, ends each watch of %s at once", f.path))
		}
	}
	f.opened = time.Time{}
	return f.fault != nil
}

// calm ends the faults of watches that ended at once and no longer do.
func (s *session) calm() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.feeds {
		if f.brief >= mostBrief && !f.opened.IsZero() && time.Since(f.opened) >= atOnce {
			f.brief = 0
			f.followedLocked()
		}
	}
}

// failed notes that a request failed.
func (f *feed) failed(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
		return
	case expired(err):
		f.session.log.Info("the revision to continue from has expired; the resource is listed again", slog.String("resource", f.path), slog.Any("err", err))
		return
	case apierrors.IsUnauthorized(err):
		select {
		case f.session.check <- struct{}{}:
		default: // it is looked at already
		}
	}
	f.session.mu.Lock()
	defer f.session.mu.Unlock()
	f.faultLocked(err)
}

func (f *feed) faultLocked(err error) {
	f.fault = err
	f.session.awayLocked()
}

// followedLocked notes that the source is followed, unless its watches end at
// once.
func (f *feed) followedLocked() {
	if f.fault != nil && f.brief < mostBrief {
		f.fault = nil
		f.session.awayLocked()
	}
}

// Transformer implements cache.TransformingStore: only what counts is kept of
// a listing by a watch.
func (f *feed) Transformer() cache.TransformFunc {
	return func(o any) (any, error) {
		if o, ok := o.(*object); ok {
			f.session.read(f.kind, o)
		}
		return o, nil
	}
}

// Replace implements cache.ReflectorStore: a listing.
func (f *feed) Replace(items []any, revision string) error {
	s := f.session
	s.mu.Lock()
	defer s.mu.Unlock()
	touched := map[registry.Key]bool{}
	names := make(map[name]bool, len(items))
	for _, item := range items {
		o := item.(*object) //nolint:forcetypeassert // of this package
		s.put(f.kind, o, touched)
		names[o.name()] = true
	}
	for n := range f.names {
		if !names[n] {
			s.remove(f.kind, n, touched)
		}
	}
	f.names = names
	if was := s.revisions[f.path]; goesBack(was, revision) {
		s.lost = fmt.Errorf("the revision went back from %s to %s", was, revision)
	}
	s.revisions[f.path], f.revision = revision, revision
	away := s.away
	f.followedLocked()
	switch {
	case s.missingLocked(), away != "" && s.away == "": // there everything was told
	case s.away != "" && s.told:
		// What is known of another source is old, and confirms nothing.
		s.takeLocked(s.changed(maps.Keys(touched)))
	default:
		s.listedLocked()
	}
	return nil
}

// Add implements cache.ReflectorStore.
func (f *feed) Add(o any) error { return f.Update(o) }

// Update implements cache.ReflectorStore.
func (f *feed) Update(item any) error {
	s := f.session
	o := item.(*object) //nolint:forcetypeassert // of this package
	s.read(f.kind, o)
	return f.change(o.ResourceVersion, func(touched map[registry.Key]bool) {
		f.names[o.name()] = true
		s.put(f.kind, o, touched)
	})
}

// Delete implements cache.ReflectorStore.
func (f *feed) Delete(item any) error {
	o := item.(*object) //nolint:forcetypeassert // of this package
	return f.change(o.ResourceVersion, func(touched map[registry.Key]bool) {
		delete(f.names, o.name())
		f.session.remove(f.kind, o.name(), touched)
	})
}

// Bookmark implements cache.ReflectorBookmarkStore: nothing changed up to a
// revision.
func (f *feed) Bookmark(revision string) error {
	return f.change(revision, func(map[registry.Key]bool) {})
}

// Resync implements cache.ReflectorStore.
func (*feed) Resync() error { return nil }

// change applies what a watch says.
func (f *feed) change(revision string, apply func(touched map[registry.Key]bool)) error {
	s := f.session
	s.mu.Lock()
	defer s.mu.Unlock()
	if goesBack(f.revision, revision) {
		f.faultLocked(fmt.Errorf("the server's revision of %s went back from %s to %s: it has lost data, was restored from a backup, or another one has taken its place", f.path, f.revision, revision))
		f.stop() // for a listing
		return nil
	}
	f.revision = cmp.Or(revision, f.revision)
	s.revisions[f.path] = f.revision
	f.brief = 0
	f.followedLocked()
	touched := map[registry.Key]bool{}
	apply(touched)
	switch {
	case s.missingLocked():
	case s.doubt && s.away == "":
		s.listedLocked()
	default:
		s.takeLocked(s.changed(maps.Keys(touched)))
		if len(touched) > 0 && f.kind != "EndpointSlice" && f.kind != "Pod" { // which are never left out
			s.tell(s.catalog)
		}
	}
	return nil
}

// missingLocked reports whether there is a source without a listing.
func (s *session) missingLocked() bool {
	return slices.ContainsFunc(s.feeds, func(f *feed) bool { return f.names == nil })
}

// listedLocked takes everything, once every source is listed.
func (s *session) listedLocked() {
	if s.missingLocked() {
		return
	}
	l := s.all()
	s.told, s.doubt = true, l.Doubt != nil
	if is := s.follower.identity(); is != "" {
		if was := s.run.identity; was != "" && is != was {
			s.lost = errors.New("another cluster answers: its Service default/kubernetes has another UID")
		}
		s.run.identity = is
	}
	if l.Lost = s.lost; s.lost != nil {
		s.log.Info("the cluster has lost data", slog.Any("err", s.lost))
		s.lost = nil
	}
	text := ""
	if len(s.feeds) == 0 {
		text = "the cluster has none of the kinds that are followed; they are looked for every minute"
	}
	s.catalog.Problem("kinds", text)
	s.tell(s.catalog)
	s.takeLocked(l)
}

// heardLocked notes that the server answers.
func (s *session) heardLocked() {
	if !s.missingLocked() {
		s.takeLocked(plugin.Listing{})
	}
}

func (s *session) takeLocked(l plugin.Listing) {
	if s.away != "" {
		l.Away = errors.New(s.away)
	}
	s.take(l)
}

// awayLocked reports why something cannot be followed: the first reason by
// text, with everything that is forbidden. Pods that were listed once are no
// part of it: what they add to endpoints holds up none that leaves.
func (s *session) awayLocked() {
	var texts, forbidden, names []string
	pods := ""
	for _, f := range s.feeds {
		switch {
		case f.fault == nil:
		case f.kind == "Pod" && f.names != nil:
			pods = explain(f.fault).Error() + "; endpoints keep what is known of their pods, and new ones have nothing of theirs"
		case apierrors.IsForbidden(f.fault):
			forbidden, names = append(forbidden, explain(f.fault).Error()), append(names, path.Base(f.path))
		default:
			texts = append(texts, explain(f.fault).Error())
		}
	}
	if len(forbidden) > 0 {
		slices.Sort(names)
		texts = append(texts, fmt.Sprintf("it may not list %s: %s", strings.Join(slices.Compact(names), ", "), slices.Min(forbidden)))
	}
	s.catalog.Problem("pods", pods)
	was := s.away
	if s.away = ""; len(texts) > 0 {
		s.away = *s.server.Load() + ": " + slices.Min(texts)
	}
	switch {
	case s.away == was:
	case s.away != "":
		s.takeLocked(plugin.Listing{})
	default:
		s.listedLocked()
	}
}
