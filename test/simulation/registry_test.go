package simulation

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/verify"
)

const (
	serviceEntry  = "networking.istio.io/ServiceEntry"
	workloadEntry = "networking.istio.io/WorkloadEntry"
)

// item is a service or an instance of a model registry.
type item struct {
	service  string // of an instance
	address  string // of an instance
	revision uint64
}

// id names an item as the plugin does.
type id struct{ collection, name string }

// registry is a model of a registry with its plugin. The plugin works as the
// SDK does: names of what changed enter a set, from which messages are made.
type registry struct {
	w     *world
	name  string
	items map[id]item

	// What the plugin cannot see.
	partitioned bool // nothing changes for it
	emptied     bool // the registry answers that there is nothing
	emptiedAt   time.Time

	// How plugins fail.
	refuses bool // a process cannot be started
	mute    bool // it sends nothing, keep-alives included

	mu     sync.Mutex
	plugin *plugin // guarded by mu; the newest one that watches
}

// plugin is one process of a plugin.
type plugin struct {
	r       *registry
	ctx     context.Context
	out     chan *pluginv1.WatchResponse // unbuffered: a message is there when the bridge has it
	end     chan error
	dirty   []id // in the order of change
	queued  map[id]bool
	sent    map[id]bool
	begun   bool // everything is queued
	listing bool
	told    bool // that the registry cannot be followed
	last    time.Time
}

// Describe implements pluginv1.AdapterServiceClient.
func (r *registry) Describe(context.Context, *pluginv1.DescribeRequest, ...grpc.CallOption) (*pluginv1.DescribeResponse, error) {
	return &pluginv1.DescribeResponse{Name: "model", Version: "1", ConfigSchema: []byte("{}"), Collections: []string{serviceEntry, workloadEntry}}, nil
}

// Configure implements pluginv1.AdapterServiceClient.
func (r *registry) Configure(context.Context, *pluginv1.ConfigureRequest, ...grpc.CallOption) (*pluginv1.ConfigureResponse, error) {
	return &pluginv1.ConfigureResponse{}, nil
}

// Watch implements pluginv1.AdapterServiceClient.
func (r *registry) Watch(ctx context.Context, _ *pluginv1.WatchRequest, _ ...grpc.CallOption) (grpc.ServerStreamingClient[pluginv1.WatchResponse], error) {
	p := &plugin{
		r: r, ctx: ctx, out: make(chan *pluginv1.WatchResponse), end: make(chan error, 1),
		queued: map[id]bool{}, sent: map[id]bool{}, listing: true, last: time.Now(),
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.plugin = p
	return &watch{p: p}, nil
}

// Explain implements pluginv1.AdapterServiceClient. Nobody asks.
func (r *registry) Explain(context.Context, *pluginv1.ExplainRequest, ...grpc.CallOption) (*pluginv1.ExplainResponse, error) {
	return nil, status.Error(codes.Unimplemented, "there is nothing to explain")
}

// open is [supervisor.Spec.Open].
func (r *registry) open(context.Context) (pluginv1.AdapterServiceClient, error) {
	if r.refuses {
		return nil, status.Error(codes.Unavailable, "the process does not start")
	}
	return r, nil
}

// watch is the bridge's end of a plugin's stream.
type watch struct {
	grpc.ClientStream
	p *plugin
}

// Recv implements grpc.ServerStreamingClient.
func (w *watch) Recv() (*pluginv1.WatchResponse, error) {
	select {
	case m := <-w.p.out:
		return m, nil
	case err := <-w.p.end:
		return nil, err
	case <-w.p.ctx.Done():
		return nil, status.FromContextError(w.p.ctx.Err()).Err()
	}
}

// running returns the plugin if there is one that the bridge listens to.
func (r *registry) running() *plugin {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.plugin != nil && r.plugin.ctx.Err() != nil {
		r.plugin = nil
	}
	return r.plugin
}

// crash ends the plugin.
func (r *registry) crash(err error) {
	if p := r.running(); p != nil {
		p.end <- err
		r.mu.Lock()
		defer r.mu.Unlock()
		r.plugin = nil
	}
}

// visible returns what the plugin can see of an item.
func (r *registry) visible(n id) (item, bool) {
	if r.emptied {
		return item{}, false
	}
	i, ok := r.items[n]
	return i, ok
}

func (r *registry) names() []id { return sortedNames(r.items) }

func sortedNames(items map[id]item) []id {
	return slices.SortedFunc(maps.Keys(items), func(a, b id) int {
		return cmp.Or(cmp.Compare(a.collection, b.collection), cmp.Compare(a.name, b.name))
	})
}

// set changes or removes an item: the truth first, then the plugin's set.
func (r *registry) set(n id, i item, absent bool) {
	if isShared(n.name) {
		if absent {
			delete(r.items, n)
		} else {
			r.items[n] = i
		}
		r.w.share()
		if p := r.running(); p != nil {
			p.changed(n)
		}
		return
	}
	r.w.revision++
	i.revision = r.w.revision
	e := &verify.Event{Kind: verify.Truth, Collection: n.collection, Name: n.name, Service: i.service, Revision: i.revision, Absent: absent}
	if i.service != "" {
		e.Address = i.address
	}
	r.w.add(e)
	if absent {
		delete(r.items, n)
	} else {
		r.items[n] = i
	}
	if p := r.running(); p != nil {
		p.changed(n)
	}
}

func (p *plugin) changed(n id) {
	if !p.queued[n] {
		p.queued[n] = true
		p.dirty = append(p.dirty, n)
	}
}

// told reports whether the bridge has heard all that the plugin can see.
func (r *registry) told() bool {
	p := r.running()
	return p != nil && !p.listing && len(p.dirty) == 0
}

// relist makes the plugin look at everything again.
func (r *registry) relist() {
	if p := r.running(); p != nil {
		for _, n := range r.names() {
			p.changed(n)
		}
	}
}

// pass lets the plugin send its next message, if it has one. It reports whether
// it had.
func (r *registry) pass() bool {
	p := r.running()
	if p == nil || r.mute {
		return false
	}
	m := &pluginv1.WatchResponse{}
	switch {
	case r.partitioned && p.told:
		if time.Since(p.last) < 5*time.Second {
			return false
		}
	case r.partitioned:
		p.told = true
		m.Status = &pluginv1.Status{Error: "the registry does not answer"}
	case p.listing || len(p.dirty) > 0:
		p.fill(m)
	case p.told: // and has caught up
		p.told = false
		m.Status = &pluginv1.Status{}
	case time.Since(p.last) < 5*time.Second:
		return false
	}
	p.last = time.Now()
	select {
	case p.out <- m:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// fill adds what changed to a message, a random part of it.
func (p *plugin) fill(m *pluginv1.WatchResponse) {
	r := p.r
	if !p.begun {
		p.begun = true
		for _, n := range r.names() {
			p.changed(n)
		}
	}
	most := 1 + r.w.rand.IntN(12)
	for len(p.dirty) > 0 && len(m.GetUpserts())+len(m.GetRemovals()) < most {
		n := p.dirty[0]
		p.dirty = p.dirty[1:]
		delete(p.queued, n)
		i, ok := r.visible(n)
		if ok && i.service != "" && !p.sent[id{serviceEntry, i.service}] {
			// Its service goes first. Without one it is on its way out.
			if service := (id{serviceEntry, i.service}); visibleService(r, service) {
				p.changed(service)
				p.changed(n)
			}
			continue
		}
		switch {
		case ok:
			m.Upserts = append(m.Upserts, upsert(n, i))
			p.sent[n] = true
		case p.sent[n]:
			delete(p.sent, n)
			m.Removals = append(m.Removals, &pluginv1.Removal{Collection: n.collection, Name: n.name})
		}
	}
	if p.listing && len(p.dirty) == 0 {
		p.listing, m.Synced = false, true
	}
	m.Services = 1 // the counts are for people
}

func visibleService(r *registry, n id) bool {
	_, ok := r.visible(n)
	return ok
}

// upsert encodes an item with its revision.
func upsert(n id, i item) *pluginv1.Upsert {
	meta := testresource.Named(n.name)
	var label map[string]string
	if !isShared(n.name) { // what comes and goes with a conflict is as old as before
		label = map[string]string{verify.RevisionLabel: strconv.FormatUint(i.revision, 10)}
	}
	var body proto.Message
	u := &pluginv1.Upsert{Service: i.service}
	if n.collection == serviceEntry {
		u.Service, meta.Labels = n.name, label
		body = &networking.ServiceEntry{
			Hosts: []string{hostOf(n.name)}, Resolution: networking.ServiceEntry_STATIC, Location: networking.ServiceEntry_MESH_INTERNAL,
			Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
		}
	} else {
		body = &networking.WorkloadEntry{Address: strings.TrimSuffix(i.address, port), Ports: map[string]uint32{"http": 8080}, Labels: label}
	}
	u.Resource = testresource.Encode(meta, body)
	return u
}

// instances is how many a service has at most.
const instances = 5

// port is that of each instance.
const port = ":8080"

// address returns that of an instance.
func (r *registry) address(service string, number int) string {
	if isShared(service) && number == 0 {
		return "10.9.0.1" + port // every registry has it
	}
	return fmt.Sprintf("10.%d.%d.%d%s", r.name[2], service[len("dc0/s")], number+1, port)
}

// churn makes one random change.
func (r *registry) churn() {
	rand := r.w.rand
	service := id{serviceEntry, fmt.Sprintf("%s/s%d-%s", r.name, rand.IntN(6), r.name)}
	if rand.IntN(8) == 0 {
		service.name = r.name + "/" + sharedHosts[rand.IntN(len(sharedHosts))]
	}
	_, there := r.items[service]
	switch n := rand.IntN(20); {
	case !there:
		r.set(service, item{}, false)
	case n == 0:
		r.removeService(service)
	case n == 1:
		r.set(service, item{}, false)
	default:
		number := rand.IntN(instances)
		instance := id{workloadEntry, fmt.Sprintf("%s-%d", service.name, number)}
		i, there := r.items[instance]
		if !there {
			i = item{service: service.name, address: r.address(service.name, number)}
		}
		r.set(instance, i, there && rand.IntN(3) == 0)
	}
}

// shrink removes most services, for good.
func (r *registry) shrink() {
	for _, n := range r.names() {
		if n.collection == serviceEntry && r.w.rand.IntN(3) > 0 {
			r.removeService(n)
		}
	}
}

// removeService removes a service; its instances go first.
func (r *registry) removeService(service id) {
	for _, n := range r.names() {
		if i := r.items[n]; i.service == service.name {
			r.set(n, i, true)
		}
	}
	r.set(service, item{}, true)
}

var errEnd = []error{
	io.EOF,
	status.Error(codes.Unavailable, "the process is gone"),
	status.Error(codes.Internal, "a message does not decode"),
	status.Error(codes.Aborted, "the adapter gave up"),
}
