package kubernetes

import (
	"cmp"
	"container/heap"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
)

const (
	// fieldManager is the one of server-side apply.
	fieldManager = "isthmus"
	// pageObjects is the number of objects of one page of a listing.
	pageObjects = 500
	// listTime bounds a listing.
	listTime = 5 * time.Minute
	// listEvery is the time between two listings, which find what others did to
	// objects.
	listEvery = 10 * time.Minute
	// sweepEvery is the time between two looks at whether what is left may be
	// removed.
	sweepEvery = 5 * time.Second
	// Pauses after an error.
	minPause, maxPause = time.Second, 5 * time.Minute
	// maxReason bounds what is kept of the API server's words.
	maxReason = 1000
)

// entries are what is read of the state: a change of an instance is none of
// them.
var entries = state.Kind{Collection: collection.ServiceEntry, Shape: StubForm.Shape}

// Options are the options of a [Consumer].
type Options struct {
	// Stub says how objects are made. Its consumer is unique in a cluster, but
	// for replicas of one bridge.
	Stub Stub
	// Kubeconfig is a file with the API server and the user; "" is the cluster
	// of the pod.
	Kubeconfig string
	// Namespaces are those that are written to, nil for any.
	Namespaces []string
	// LeaseNamespace is the namespace of the Lease, "" for that of the pod or
	// of the kubeconfig.
	LeaseNamespace string
	// Shard is a part of the name of the Lease, "" for a process that has all
	// hosts.
	Shard string
	// Has reports whether a host is one of the process's.
	Has func(host string) bool
	// WritesPerSecond bounds writes.
	WritesPerSecond int
	// Complete reports whether what is not served is known not to be there:
	// every registry has completed a first listing. Objects from before the
	// process began are removed only then.
	Complete func() bool

	// 0 for the constants.
	listEvery, minPause, maxPause time.Duration
}

// key identifies an object.
type key struct{ namespace, name string }

// object is one object: as it has to be, and as it was seen.
type object struct {
	key
	// of is the ServiceEntry, nil if there is to be no object. hash is that of
	// the object which is to be.
	of   *state.Record
	hash string
	// gone reports that the service was removed while it was followed.
	gone bool

	// uid and version are of the object as it was seen last, "" if it was not;
	// has is its hash annotation.
	uid, version, has string

	state  State
	reason string // the API server's, "" unless it refused
	since  time.Time

	due   time.Time // when it is its turn
	fails int       // in sequence
	index int       // in the queue, -1 if it is not there
}

// Consumer writes objects to one API server while it holds its lease. It reads
// a view as sinks do: state and a cursor, so that a change that comes while it
// is busy replaces the one before.
type Consumer struct {
	o      Options
	view   *view.View
	log    *slog.Logger
	close  func() // idle connections
	api    dynamic.NamespaceableResourceInterface
	lease  *lease
	budget *rate.Limiter

	// Of lead only.
	cursor state.Cursor
	listed time.Time // when the objects were listed, zero before

	mu      sync.Mutex // guards what follows; lead alone changes it but for holder
	objects map[key]*object
	counts  map[State]int
	without map[string]string // services without an object, with the reason
	queue   queue
	holder  string
	held    error // why nothing is known of the lease
	heldAt  time.Time
	leading bool
	waiting bool // for the first listings of registries
	trouble error
	since   time.Time     // of trouble
	pause   time.Duration // after trouble
	until   time.Time     // the end of that pause
	writes  Writes
}

// New returns a consumer of a view that is not running. The error is one of the
// kubeconfig.
func New(v *view.View, o Options, log *slog.Logger) (*Consumer, error) {
	client, closeIdle, namespace, err := connect(o.Kubeconfig)
	if err != nil {
		return nil, err
	}
	if o.LeaseNamespace != "" {
		namespace = o.LeaseNamespace
	}
	o.listEvery, o.minPause, o.maxPause = cmp.Or(o.listEvery, listEvery), cmp.Or(o.minPause, minPause), cmp.Or(o.maxPause, maxPause)
	host, err := os.Hostname()
	if err != nil {
		return nil, err
	}
	c := &Consumer{
		o: o, view: v, log: log.With("consumer", o.Stub.Consumer), close: closeIdle, api: client.Resource(serviceEntries),
		budget:  rate.NewLimiter(rate.Limit(o.WritesPerSecond), o.WritesPerSecond),
		objects: make(map[key]*object), counts: make(map[State]int), without: make(map[string]string),
	}
	name := "isthmus-" + o.Stub.Consumer
	if o.Shard != "" {
		name += "-" + o.Shard
	}
	c.lease = &lease{
		api: client.Resource(leases).Namespace(namespace), name: name, identity: host + "_" + crand.Text()[:8],
		told: func(holder string, err error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			if err != nil {
				if c.held == nil {
					c.heldAt = time.Now()
					c.log.Warn("the Lease of the consumer cannot be taken or renewed", "lease", namespace+"/"+name, "err", err)
				}
				c.held = err
				return
			}
			if holder != c.holder {
				c.log.Info("who writes to Kubernetes has changed", "lease", namespace+"/"+name, "holder", holder)
			}
			c.held, c.holder = nil, holder
		},
	}
	return c, nil
}

// Run writes until ctx ends.
func (c *Consumer) Run(ctx context.Context) {
	defer c.close()
	// Who needs to know is told by the status.
	c.lease.run(klog.NewContext(ctx, klog.Logger{}), c.lead)
}

// lead writes until ctx ends.
func (c *Consumer) lead(ctx context.Context) {
	c.begin(true)
	defer c.begin(false)
	for ctx.Err() == nil {
		changed := c.view.Changed() // read before the changes, so that none is missed
		c.follow()
		if next := c.step(ctx); next > 0 {
			t := time.NewTimer(next)
			select {
			case <-changed:
			case <-t.C:
			case <-ctx.Done():
			}
			t.Stop()
		}
	}
}

// begin forgets what was known of the objects: another process may write, or
// may have written.
func (c *Consumer) begin(leading bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.objects, c.counts, c.without, c.queue = make(map[key]*object), make(map[State]int), make(map[string]string), nil
	c.cursor, c.listed, c.leading, c.waiting = state.Cursor{}, time.Time{}, leading, false
	c.trouble, c.until, c.pause = nil, time.Time{}, 0
}

// step does one thing that is due, and returns how long there is nothing to do.
func (c *Consumer) step(ctx context.Context) (pause time.Duration) {
	now := time.Now()
	switch {
	case c.until.After(now):
		return c.until.Sub(now)
	case c.listed.IsZero() || now.Sub(c.listed) >= c.o.listEvery:
		c.settle(ctx, c.attempt(func() error { return c.list(ctx) }))
		return 0
	case c.waiting:
		return time.Minute // or a change
	}
	c.sweep()
	pause = c.o.listEvery - now.Sub(c.listed)
	if c.counts[Left] > 0 {
		pause = min(pause, sweepEvery)
	}
	if len(c.queue) == 0 {
		return pause
	}
	o := c.queue[0]
	if wait := o.due.Sub(now); wait > 0 {
		return min(wait, pause)
	}
	if c.budget.Wait(ctx) != nil {
		return 0
	}
	c.follow() // what has changed in the meantime is written, not what was
	if o.index >= 0 {
		c.settle(ctx, c.attempt(func() error { return c.write(ctx, o) }))
	}
	return 0
}

// attempt calls f. A panic there, which is a defect of the bridge, is an error.
func (c *Consumer) attempt(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			c.log.Error("the bridge has met a defect of its own and goes on", "doing", "write to Kubernetes", "err", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = fmt.Errorf("a defect of the bridge: %v", p)
		}
	}()
	return f()
}

// settle notes whether the API server can be used.
func (c *Consumer) settle(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		if c.trouble != nil {
			c.log.Info("the API server of Kubernetes takes requests again", "after", time.Since(c.since).Round(time.Second))
		}
		c.trouble, c.pause = nil, 0
		return
	}
	if c.trouble == nil {
		c.since = time.Now()
		c.log.Warn("the API server of Kubernetes cannot be written to; its objects stay as they are", "err", err)
	}
	c.trouble = err
	c.pause = min(max(2*c.pause, c.o.minPause), time.Minute, c.o.maxPause)
	c.until = time.Now().Add(c.pause + rand.N(c.pause/4))
}

// follow reads what has changed.
func (c *Consumer) follow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting = !c.view.Initialized(entries.Collection); c.waiting {
		return
	}
	for change := range c.view.Changes(entries, &c.cursor) {
		c.wantLocked(&change)
	}
	if !c.cursor.Lost {
		return
	}
	// What is gone meanwhile is whatever is not there now.
	gone := make(map[key]*object)
	for k, o := range c.objects {
		if o.of != nil {
			gone[k] = o
		}
	}
	c.cursor, c.without = state.Cursor{}, make(map[string]string)
	for change := range c.view.Changes(entries, &c.cursor) {
		delete(gone, keyOf(change.Name))
		c.wantLocked(&change)
	}
	for _, o := range gone {
		c.dropLocked(o)
	}
}

func keyOf(name string) key {
	namespace, name, _ := strings.Cut(name, "/")
	return key{namespace, stubName(name)}
}

// wantLocked applies a change of the state.
func (c *Consumer) wantLocked(change *state.Change) {
	k := keyOf(change.Name)
	o := c.objects[k]
	delete(c.without, change.Name)
	if change.Removed {
		c.dropLocked(o)
		return
	}
	made, err := c.o.Stub.ObjectOf(change.Record)
	if err != nil {
		c.without[change.Name] = err.Error()
		c.dropLocked(o)
		return
	}
	if o == nil {
		o = &object{key: k, index: -1}
		c.objects[k] = o
	}
	o.of, o.gone = change.Record, false
	if hash := made.GetAnnotations()[HashAnnotation]; hash != o.hash {
		o.hash = hash
		c.turnLocked(o)
	}
}

// dropLocked makes an object, nil for none, one that is not to be.
func (c *Consumer) dropLocked(o *object) {
	if o == nil || o.of == nil {
		return
	}
	o.of, o.hash, o.gone = nil, "", true
	c.turnLocked(o)
}

// turnLocked queues an object that is not as it has to be.
func (c *Consumer) turnLocked(o *object) {
	o.fails, o.reason = 0, ""
	if o.of != nil && o.uid != "" && o.has == o.hash {
		c.leaveLocked(o)
		c.setLocked(o, Written, "")
		return
	}
	c.setLocked(o, Pending, "")
	if o.index < 0 || o.due.After(time.Now()) { // one that waits for its turn keeps it
		c.queueLocked(o, 0)
	}
}

// setLocked sets the state of an object.
func (c *Consumer) setLocked(o *object, s State, reason string) {
	if o.state == s && o.reason == reason {
		return
	}
	if o.state != "" {
		c.counts[o.state]--
	}
	c.counts[s]++
	o.state, o.reason, o.since = s, reason, time.Now()
}

// queueLocked sets when it is an object's turn.
func (c *Consumer) queueLocked(o *object, after time.Duration) {
	o.due = time.Now().Add(after)
	if o.index >= 0 {
		heap.Fix(&c.queue, o.index)
	} else {
		heap.Push(&c.queue, o)
	}
}

func (c *Consumer) leaveLocked(o *object) {
	if o.index >= 0 {
		heap.Remove(&c.queue, o.index)
	}
}

// sweep queues objects from before the process began whose services are not
// there.
func (c *Consumer) sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.counts[Left] == 0 || !c.o.Complete() {
		return
	}
	for _, o := range c.objects {
		if o.state == Left {
			o.gone = true
			c.turnLocked(o)
		}
	}
}

// list reads all objects of the consumer. Without an error the list is
// complete.
func (c *Consumer) list(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	namespaces := c.o.Namespaces
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	var all []unstructured.Unstructured
	for _, ns := range namespaces {
		options := metav1.ListOptions{LabelSelector: ConsumerLabel + "=" + c.o.Stub.Consumer, Limit: pageObjects}
		for {
			page, err := c.api.Namespace(ns).List(ctx, options)
			if err != nil {
				return fmt.Errorf("list ServiceEntries: %w", err)
			}
			all = append(all, page.Items...)
			next := page.GetContinue()
			if next == "" {
				break
			}
			if next == options.Continue {
				return errors.New("list ServiceEntries: the same page again")
			}
			options.Continue = next
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := make(map[key]bool, len(all))
	for i := range all {
		u := &all[i]
		if !c.own(u) || !c.o.Has(firstHost(u)) {
			continue
		}
		k := key{u.GetNamespace(), u.GetName()}
		seen[k] = true
		o := c.objects[k]
		if o == nil {
			o = &object{key: k, index: -1}
			c.objects[k] = o
		}
		o.see(u)
		switch {
		case o.of == nil && !o.gone:
			c.setLocked(o, Left, "")
		case o.of != nil && o.has != o.hash && o.index < 0 || o.of != nil && o.has == o.hash:
			c.turnLocked(o)
		}
	}
	for k, o := range c.objects {
		if seen[k] || o.uid == "" {
			continue
		}
		o.unsee() // somebody has deleted it
		if o.of == nil {
			c.forgetLocked(o)
		} else {
			c.turnLocked(o)
		}
	}
	c.listed = time.Now()
	return nil
}

func firstHost(u *unstructured.Unstructured) string {
	hosts, _, _ := unstructured.NestedStringSlice(u.Object, "spec", "hosts")
	if len(hosts) == 0 {
		return ""
	}
	return hosts[0]
}

// own reports whether an object is the consumer's.
func (c *Consumer) own(u *unstructured.Unstructured) bool {
	return u.GetLabels()[ConsumerLabel] == c.o.Stub.Consumer && u.GetUID() != "" && u.GetResourceVersion() != ""
}

// see notes what an object is like.
func (o *object) see(u *unstructured.Unstructured) {
	o.uid, o.version, o.has = string(u.GetUID()), u.GetResourceVersion(), u.GetAnnotations()[HashAnnotation]
}

func (o *object) unsee() { o.uid, o.version, o.has = "", "", "" }

func (c *Consumer) forgetLocked(o *object) {
	c.leaveLocked(o)
	c.counts[o.state]--
	delete(c.objects, o.key)
}

// write makes one object what it has to be. Its error is one that concerns all
// objects.
func (c *Consumer) write(ctx context.Context, o *object) error {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTime)
	defer cancel()
	api := c.api.Namespace(o.namespace)
	if o.uid == "" {
		u, err := api.Get(ctx, o.name, metav1.GetOptions{})
		if err == nil && !c.own(u) {
			c.mu.Lock()
			defer c.mu.Unlock()
			if o.of == nil {
				c.forgetLocked(o)
				return nil
			}
			c.refuseLocked(o, Conflict, "there is an object of this name that is not the consumer's (label "+ConsumerLabel+")")
			return nil
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return c.failed(o, err)
		}
		if err == nil {
			c.mu.Lock()
			o.see(u)
			c.mu.Unlock()
		}
	}
	if o.of == nil {
		return c.remove(ctx, api, o)
	}
	if o.uid != "" && o.has == o.hash {
		c.done(o, nil)
		return nil
	}
	u, err := c.o.Stub.ObjectOf(o.of)
	if err != nil {
		return err // it was made before
	}
	if o.uid != "" {
		// Whatever changed since it was seen, or is another object of this
		// name, is looked at first.
		u.SetUID(types.UID(o.uid))
		u.SetResourceVersion(o.version)
	}
	made, err := api.Apply(ctx, o.name, u, metav1.ApplyOptions{FieldManager: fieldManager, Force: o.uid != ""})
	if err != nil {
		return c.failed(o, err)
	}
	c.done(o, made)
	return nil
}

// remove deletes an object as it was seen, and no other.
func (c *Consumer) remove(ctx context.Context, api dynamic.ResourceInterface, o *object) error {
	if o.uid != "" {
		err := api.Delete(ctx, o.name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: new(types.UID(o.uid)), ResourceVersion: &o.version}})
		if err != nil && !apierrors.IsNotFound(err) {
			return c.failed(o, err)
		}
		c.mu.Lock()
		c.writes.Removed++
		c.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetLocked(o)
	return nil
}

// done notes that an object is as it has to be, and what it is like if it was
// written.
func (c *Consumer) done(o *object, made *unstructured.Unstructured) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if made != nil {
		o.see(made)
		c.writes.Applied++
	}
	o.fails = 0
	if o.has != o.hash {
		// A webhook has changed it, which would have it written for ever.
		c.refuseLocked(o, Refused, "the API server keeps another "+HashAnnotation+" than what was written")
		return
	}
	c.leaveLocked(o)
	c.setLocked(o, Written, "")
}

// refuseLocked notes why an object is not written, and tries again later.
func (c *Consumer) refuseLocked(o *object, s State, reason string) {
	reason = clip.Text(reason, maxReason)
	if c.counts[Refused]+c.counts[Conflict] == 0 { // the list has the others
		c.log.Warn("an object is not written to Kubernetes", "object", o.namespace+"/"+o.name, "state", s, "err", reason)
	}
	c.setLocked(o, s, reason)
	c.retryLocked(o)
}

func (c *Consumer) retryLocked(o *object) {
	pause := min(c.o.minPause<<min(o.fails, 10), c.o.maxPause)
	o.fails++
	c.queueLocked(o, pause+rand.N(pause/4))
}

// failed notes that a request about an object failed. It returns the error if
// it concerns all objects.
func (c *Consumer) failed(o *object, err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	status, answered := errors.AsType[*apierrors.StatusError](err)
	c.writes.Failed++
	switch {
	case !answered, apierrors.IsUnauthorized(err), status.ErrStatus.Code >= 500, apierrors.IsTooManyRequests(err), apierrors.IsTimeout(err):
		c.setLocked(o, Pending, clip.Text(err.Error(), maxReason))
		c.retryLocked(o) // after others: it may be the only one
		return err
	case apierrors.IsConflict(err) && o.uid != "" && o.fails == 0:
		o.unsee() // it is another by now, as when istiod has written its status
		o.fails++
		c.queueLocked(o, 0)
	case apierrors.IsConflict(err) && o.uid != "":
		o.unsee()
		c.retryLocked(o)
	case apierrors.IsConflict(err):
		c.refuseLocked(o, Conflict, err.Error())
	case apierrors.IsNotFound(err) && o.uid != "":
		o.unsee()
		c.retryLocked(o)
	default:
		c.refuseLocked(o, Refused, err.Error())
	}
	return nil
}

// queue orders objects by when it is their turn.
type queue []*object

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].index, q[j].index = i, j
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	o := x.(*object)
	o.index = len(*q)
	*q = append(*q, o)
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	last := len(*q) - 1
	o := (*q)[last]
	(*q)[last] = nil
	*q, o.index = (*q)[:last], -1
	return o
}
