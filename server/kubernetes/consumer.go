package kubernetes

import (
	"cmp"
	"container/heap"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
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
	// podsFor is how long it is believed which addresses are those of pods.
	podsFor = 30 * time.Second
	// maxReason bounds what is kept of the API server's words.
	maxReason = 1000
)

// Maker says which objects a service has: a [Stub], [Services]
// or [Workloads].
type Maker interface {
	// Reads is what is read of the state.
	Reads() state.Kind
	// Plan returns what there is to be of a service, which is a function of the
	// record alone.
	Plan(r *state.Record) Plan

	consumer() string
	kinds() []kind
}

// Plan is what there is to be of a service.
type Plan struct {
	// Objects are sorted; the others are written while the first of them is.
	Objects []*unstructured.Unstructured
	// Without has the reasons of the resources that have no object, by name.
	Without map[string]string
}

// Options are the options of a [Consumer].
type Options struct {
	// Make says how objects are made. Its consumer is unique in a cluster, but
	// for replicas of one bridge.
	Make Maker
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
type key struct{ kind, namespace, name string }

func keyOf(u *unstructured.Unstructured) key { return key{u.GetKind(), u.GetNamespace(), u.GetName()} }

// service is what there is to be of a ServiceEntry.
type service struct {
	record  *state.Record
	objects []*object         // the others need the first
	without map[string]string // see [Plan]
}

// object is one object: as it has to be, and as it was seen.
type object struct {
	key
	// of is the service, nil if there is to be no object. hash is that of the
	// object which is to be.
	of   *service
	hash string
	// gone reports that it was to be, and is not any more.
	gone bool
	// address is that of a WorkloadEntry, "" of other kinds.
	address string
	// part is the ServiceEntry whose instances an EndpointSlice shares with
	// others, "" of other kinds.
	part string

	// uid and version are of the object as it was seen last, "" if it was not;
	// has is its hash annotation.
	uid, version, has string
	headless          bool // of a Service, for ever

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
	close  func()                                            // idle connections
	apis   map[string]dynamic.NamespaceableResourceInterface // by kind
	lease  *lease
	budget *rate.Limiter

	// Of lead only.
	cursor state.Cursor
	listed time.Time // when the objects were listed, zero before
	next   time.Time // when changes are read next
	// What was made last, as the next write is often of the same service.
	made   *state.Record
	making map[key]*unstructured.Unstructured
	// The pods of the cluster by address, nil unless WorkloadEntries are
	// written, and when they were listed.
	pods   map[string]string
	podsAt time.Time
	podAPI dynamic.ResourceInterface

	mu       sync.Mutex // guards what follows; lead alone changes it but for holder
	services map[string]*service
	objects  map[key]*object
	counts   map[State]int
	without  int // resources without an object
	refused  map[*object]struct{}
	first    *object // of those that are refused, nil without any
	queue    queue
	holder   string
	held     error // why nothing is known of the lease
	heldAt   time.Time
	leading  bool
	waiting  bool // for the first listings of registries
	trouble  error
	since    time.Time     // of trouble
	pause    time.Duration // after trouble
	until    time.Time     // the end of that pause
	writes   Writes
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
		o: o, view: v, log: log.With("consumer", o.Make.consumer()), close: closeIdle,
		apis:   make(map[string]dynamic.NamespaceableResourceInterface),
		budget: rate.NewLimiter(rate.Limit(o.WritesPerSecond), o.WritesPerSecond),
	}
	c.begin(false)
	for _, k := range o.Make.kinds() {
		c.apis[k.name] = client.Resource(k.GroupVersionResource)
	}
	if c.apis[workloadEntries.name] != nil {
		c.podAPI = client.Resource(pods)
	}
	name := leaseOf(o.Make.consumer())
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
		paced := c.follow()
		if next := c.step(ctx); next > 0 {
			if paced > 0 {
				changed, next = nil, min(next, paced)
			}
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
	c.services, c.objects, c.counts, c.without, c.queue = make(map[string]*service), make(map[key]*object), make(map[State]int), 0, nil
	c.refused, c.first, c.made, c.making = make(map[*object]struct{}), nil, nil, nil
	c.cursor, c.listed, c.next, c.leading, c.waiting = state.Cursor{}, time.Time{}, time.Time{}, leading, false
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
	if c.hold(o) || c.budget.Wait(ctx) != nil {
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

// follow reads what has changed. It returns the pause until it does so again,
// which keeps what changes all the time to a third of a processor.
func (c *Consumer) follow() (pause time.Duration) {
	if pause = time.Until(c.next); pause > 0 {
		return pause
	}
	reads, waiting := c.o.Make.Reads(), false
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waiting = waiting
	}()
	if waiting = !c.view.Initialized(reads.Collection); waiting {
		return 0
	}
	began := time.Now()
	for change := range c.view.Changes(reads, &c.cursor) {
		c.want(change.Name, change.Record)
	}
	if c.cursor.Lost {
		// What is gone meanwhile is whatever is not there now.
		gone := maps.Clone(c.services)
		c.cursor = state.Cursor{}
		for change := range c.view.Changes(reads, &c.cursor) {
			delete(gone, change.Name)
			c.want(change.Name, change.Record)
		}
		for name := range gone {
			c.want(name, nil)
		}
	}
	c.next = time.Now().Add(2 * time.Since(began))
	return 0
}

// want notes what there is to be of a service, which is nothing without a
// record. What it keeps of the objects is their hashes.
func (c *Consumer) want(name string, r *state.Record) {
	var p Plan
	if r != nil {
		p = c.o.Make.Plan(r)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.services[name]
	if s == nil {
		s = new(service)
		c.services[name] = s
	}
	c.without += len(p.Without) - len(s.without)
	before := s.objects
	for _, o := range before {
		o.of = nil
	}
	s.record, s.without, s.objects = r, p.Without, make([]*object, 0, len(p.Objects))
	for _, u := range p.Objects {
		k := keyOf(u)
		o := c.objects[k]
		if o == nil {
			o = &object{key: k, index: -1}
			c.objects[k] = o
		}
		o.of, o.gone, o.address, o.part = s, false, field(u, "spec", "address"), partOf(u)
		s.objects = append(s.objects, o)
	}
	for i, u := range p.Objects {
		if o, hash := s.objects[i], u.GetAnnotations()[HashAnnotation]; hash != o.hash {
			o.hash = hash
			c.turnLocked(o)
		}
	}
	for _, o := range before {
		if o.of == nil {
			o.hash, o.gone = "", true
			c.turnLocked(o)
		}
	}
	if len(s.objects)+len(s.without) == 0 {
		delete(c.services, name)
	}
}

// object makes an object that there is to be.
func (c *Consumer) object(o *object) *unstructured.Unstructured {
	if of := o.of.record; c.made != of {
		c.made, c.making = of, make(map[key]*unstructured.Unstructured)
		for _, u := range c.o.Make.Plan(of).Objects {
			c.making[keyOf(u)] = u
		}
	}
	return c.making[o.key]
}

// hold reports whether an object waits, and notes why: for the first one of its
// service, which it is of no use without, or, if it is to be removed, for those
// that have its instances then.
func (c *Consumer) hold(o *object) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s := c.services[o.part]; o.of == nil && s != nil && len(s.objects) > 0 && s.objects[0].state != Conflict &&
		slices.ContainsFunc(s.objects, func(o *object) bool { return o.state != Written }) {
		c.setLocked(o, Pending, "others that take its place are not written")
		c.queueLocked(o, c.o.minPause)
		return true
	}
	if o.of == nil || o.of.objects[0].state == Written || o.of.objects[0] == o {
		return false
	}
	first := o.of.objects[0]
	if first.state == Conflict && o.uid != "" {
		return false // it is removed
	}
	c.leaveLocked(o)
	c.setLocked(o, first.state, "its "+first.kind+" is not written")
	return true
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
	before := o.state
	o.state, o.reason, o.since = s, reason, time.Now()
	if s == Refused || s == Conflict {
		c.refused[o] = struct{}{}
		if c.first == nil {
			c.first = o
		}
	} else {
		c.acceptLocked(o)
	}
	// What the others of its service wait for.
	if o.of != nil && o.of.objects[0] == o && s != before && (s == Written || s == Conflict) {
		for _, other := range o.of.objects[1:] {
			if other.state != Written || s == Conflict {
				c.queueLocked(other, 0)
			}
		}
	}
}

// acceptLocked notes that an object is not refused.
func (c *Consumer) acceptLocked(o *object) {
	delete(c.refused, o)
	if c.first != o {
		return
	}
	c.first = nil
	for next := range c.refused {
		c.first = next
		break
	}
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
	for _, k := range c.o.Make.kinds() {
		for _, ns := range namespaces {
			if err := listed(ctx, c.apis[k.name].Namespace(ns), ConsumerLabel+"="+c.o.Make.consumer(), &all); err != nil {
				return fmt.Errorf("list %s: %w", k.Resource, err)
			}
		}
	}
	if err := c.listPods(ctx, 0); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	seen := make(map[key]bool, len(all))
	for i := range all {
		u := &all[i]
		if c.apis[u.GetKind()] == nil || !c.own(u) || !c.o.Has(hostOf(u)) {
			continue
		}
		k := keyOf(u)
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
	for _, o := range c.objects {
		if o.of == nil || o.address == "" {
			continue
		}
		if pod := c.pods[o.address] != ""; pod && o.uid != "" || !pod && o.state == Without {
			c.setLocked(o, Pending, "")
			c.queueLocked(o, 0)
		}
	}
	c.listed = time.Now()
	return nil
}

// listPods notes the addresses of pods if that was done longer than a time ago.
// Those of hosts and of pods that have ended are none.
func (c *Consumer) listPods(ctx context.Context, ago time.Duration) error {
	if c.podAPI == nil || ago > 0 && time.Since(c.podsAt) < ago {
		return nil
	}
	now := time.Now()
	found := make(map[string]string)
	if err := pages(ctx, c.podAPI, "", func(u *unstructured.Unstructured) {
		host, _, _ := unstructured.NestedBool(u.Object, "spec", "hostNetwork")
		if phase := field(u, "status", "phase"); host || phase == "Succeeded" || phase == "Failed" {
			return
		}
		ips, _, _ := unstructured.NestedSlice(u.Object, "status", "podIPs")
		for _, ip := range append(ips, map[string]any{"ip": field(u, "status", "podIP")}) {
			fields, _ := ip.(map[string]any)
			text, _, _ := unstructured.NestedString(fields, "ip")
			if a, err := netip.ParseAddr(text); err == nil {
				found[a.Unmap().String()] = u.GetNamespace() + "/" + u.GetName()
			}
		}
	}); err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	c.pods, c.podsAt = found, now
	return nil
}

// listed appends the objects with a label. Without an error it has all of them.
func listed(ctx context.Context, api dynamic.ResourceInterface, label string, all *[]unstructured.Unstructured) error {
	return pages(ctx, api, label, func(u *unstructured.Unstructured) { *all = append(*all, *u) })
}

// pages calls f with all objects with a label, page by page.
func pages(ctx context.Context, api dynamic.ResourceInterface, label string, f func(*unstructured.Unstructured)) error {
	options := metav1.ListOptions{LabelSelector: label, Limit: pageObjects}
	for {
		page, err := api.List(ctx, options)
		if err != nil {
			return err
		}
		for i := range page.Items {
			f(&page.Items[i])
		}
		next := page.GetContinue()
		if next == "" {
			return nil
		}
		if next == options.Continue {
			return errors.New("the same page again")
		}
		options.Continue = next
	}
}

// hostOf returns the host of the service that an object is of.
func hostOf(u *unstructured.Unstructured) string {
	hosts, _, _ := unstructured.NestedStringSlice(u.Object, "spec", "hosts")
	return cmp.Or(u.GetAnnotations()[HostAnnotation], append(hosts, "")[0])
}

// own reports whether an object is the consumer's.
func (c *Consumer) own(u *unstructured.Unstructured) bool {
	return u.GetLabels()[ConsumerLabel] == c.o.Make.consumer() && u.GetUID() != "" && u.GetResourceVersion() != ""
}

// see notes what an object is like.
func (o *object) see(u *unstructured.Unstructured) {
	o.part = partOf(u)
	o.uid, o.version, o.has = string(u.GetUID()), u.GetResourceVersion(), u.GetAnnotations()[HashAnnotation]
	o.headless = headless(u)
}

// partOf returns the name of the ServiceEntry that an EndpointSlice has a part
// of, "" of another object.
func partOf(u *unstructured.Unstructured) string {
	if u.GetKind() != endpointSlices.name {
		return ""
	}
	return u.GetNamespace() + "/" + u.GetLabels()[serviceNameLabel]
}

// headless reports whether an object is a headless Service.
func headless(u *unstructured.Unstructured) bool { return field(u, "spec", "clusterIP") == noAddress }

func (o *object) unsee() { o.uid, o.version, o.has = "", "", "" }

func (c *Consumer) forgetLocked(o *object) {
	c.leaveLocked(o)
	c.acceptLocked(o)
	c.counts[o.state]--
	delete(c.objects, o.key)
}

// write makes one object what it has to be. Its error is one that concerns all
// objects.
func (c *Consumer) write(ctx context.Context, o *object) error {
	ctx, cancel := context.WithTimeout(ctx, 2*requestTime)
	defer cancel()
	api := c.apis[o.kind].Namespace(o.namespace)
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
	if o.of == nil || o.of.objects[0].state == Conflict && o.of.objects[0] != o {
		return c.remove(ctx, api, o)
	}
	if o.address != "" {
		if err := c.listPods(ctx, podsFor); err != nil {
			return c.failed(o, err)
		}
		if pod := c.pods[o.address]; pod != "" && o.uid != "" {
			return c.remove(ctx, api, o)
		} else if pod != "" {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.leaveLocked(o)
			c.setLocked(o, Without, "its address "+o.address+" is that of the pod "+pod+", which ztunnel has already")
			return nil
		}
	}
	if o.uid != "" && o.has == o.hash {
		c.done(o, nil)
		return nil
	}
	u := c.object(o)
	if o.uid != "" && headless(u) != o.headless {
		return c.remove(ctx, api, o) // it cannot be changed, and comes back
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
	if o.of == nil {
		c.forgetLocked(o)
		return nil
	}
	o.unsee()
	c.queueLocked(o, 0) // to be held
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
