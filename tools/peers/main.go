// Command peers is what Isthmus is measured beside: a server that holds
// WorkloadEntries, changes one after the other, and sends them to delta or
// state-of-the-world sinks in one of these ways:
//
//	linear    LinearCache of go-control-plane
//	snapshot  SnapshotCache of go-control-plane
//	bare      no cache: grpc-go with the messages of each change, encoded before
//
// It prints {"address": ADDRESS}. The line "run RATE TOTAL" on its standard input
// makes so many changes, so many in a second. It ends when its input does.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
)

const workloadEntry = "networking.istio.io/v1/WorkloadEntry"

func main() {
	log.SetFlags(0)
	var (
		kind     = flag.String("kind", "linear", "linear, snapshot or bare")
		services = flag.Int("services", 10_000, "number of services")
		each     = flag.Int("instances", 10, "number of instances of each service")
	)
	flag.Parse()
	if err := run(*kind, *services, *each); err != nil {
		log.Fatal(err)
	}
}

// source sends resources to sinks.
type source interface {
	// set changes a resource.
	set(name string, r *mcp.Resource) error
	register(s *grpc.Server)
}

func run(kind string, services, each int) error {
	all := make(map[string]*mcp.Resource, services*each)
	var names []string
	for i := range services {
		for j := range each {
			name := fmt.Sprintf("bench/svc-%05d-%d", i, j)
			names = append(names, name)
			all[name] = resource(name, i, j, 0)
		}
	}
	var s source
	var err error
	switch kind {
	case "linear":
		s, err = newLinear(all)
	case "snapshot":
		s, err = newSnapshots(all)
	case "bare":
		s, err = newBare(all)
	default:
		return fmt.Errorf("--kind %s: must be linear, snapshot or bare", kind)
	}
	if err != nil {
		return err
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	g := grpc.NewServer(grpc.InitialWindowSize(8<<20), grpc.InitialConnWindowSize(8<<20))
	s.register(g)
	failed := make(chan error, 1)
	go func() { failed <- g.Serve(lis) }()
	if err := json.NewEncoder(os.Stdout).Encode(map[string]string{"address": lis.Addr().String()}); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var rate float64
		var total int64
		if _, err := fmt.Sscanf(lines.Text(), "run %g %d", &rate, &total); err != nil {
			return fmt.Errorf("%q: must be run RATE TOTAL: %w", lines.Text(), err)
		}
		go func() {
			// The changes, each at its time, as the sim registry makes them.
			begin := time.Now()
			for n := int64(0); n < total; n++ {
				time.Sleep(time.Until(begin.Add(time.Duration(float64(n) / rate * float64(time.Second)))))
				at := int(n*7919) % len(names)
				if err := s.set(names[at], resource(names[at], at/each, at%each, time.Now().UnixNano())); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	select {
	case err := <-failed:
		return err
	default:
		return nil
	}
}

// resource is an instance as Isthmus serves it, with the time of its change.
func resource(name string, service, instance int, changed int64) *mcp.Resource {
	labels := map[string]string{"version": "v1", "app": fmt.Sprintf("svc-%05d", service)}
	if changed > 0 {
		labels["changed-at"] = strconv.FormatInt(changed, 10)
	}
	body, err := anypb.New(&networking.WorkloadEntry{
		Address: fmt.Sprintf("10.%d.%d.%d", service>>8, service&255, instance), Ports: map[string]uint32{"http": 8080},
		Labels: labels, Weight: 1, Locality: "sim-1/sim-1a",
	})
	if err != nil {
		log.Fatal(err)
	}
	return &mcp.Resource{Metadata: &mcp.Metadata{
		Name: name, CreateTime: timestamppb.New(time.Unix(1_700_000_000, 0)), Version: strconv.FormatInt(changed, 10), Labels: labels,
	}, Body: body}
}

// linear is a LinearCache.
type linear struct{ cache *cache.LinearCache }

func newLinear(all map[string]*mcp.Resource) (*linear, error) {
	initial := make(map[string]types.Resource, len(all))
	for name, r := range all {
		initial[name] = r
	}
	return &linear{cache.NewLinearCache(workloadEntry, cache.WithInitialResources(initial))}, nil
}

func (l *linear) set(name string, r *mcp.Resource) error { return l.cache.UpdateResource(name, r) }

func (l *linear) register(s *grpc.Server) {
	discovery.RegisterAggregatedDiscoveryServiceServer(s, server.NewServer(context.Background(), l.cache, nil))
}

// snapshots is a SnapshotCache with one node.
type snapshots struct {
	cache   cache.SnapshotCache
	all     map[string]types.Resource
	version int
}

func newSnapshots(all map[string]*mcp.Resource) (*snapshots, error) {
	s := &snapshots{cache: cache.NewSnapshotCache(true, everyone{}, nil), all: make(map[string]types.Resource, len(all))}
	for name, r := range all {
		s.all[name] = r
	}
	return s, s.publish()
}

// everyone puts all nodes into one group.
type everyone struct{}

func (everyone) ID(*core.Node) string { return "bench" }

// set makes a new snapshot, since a snapshot must not change.
func (s *snapshots) set(name string, r *mcp.Resource) error {
	s.all = maps.Clone(s.all)
	s.all[name] = r
	return s.publish()
}

func (s *snapshots) publish() error {
	s.version++
	return s.cache.SetSnapshot(context.Background(), "bench", &snapshot{version: strconv.Itoa(s.version), all: s.all})
}

func (s *snapshots) register(g *grpc.Server) {
	discovery.RegisterAggregatedDiscoveryServiceServer(g, server.NewServer(context.Background(), s.cache, nil))
}

// snapshot is a snapshot of a type that go-control-plane does not know.
type snapshot struct {
	version  string
	all      map[string]types.Resource
	versions map[string]string
}

func (s *snapshot) GetVersion(typ string) string {
	if typ == workloadEntry {
		return s.version
	}
	return ""
}

func (s *snapshot) GetResourcesAndTTL(typ string) map[string]types.ResourceWithTTL {
	if typ != workloadEntry {
		return nil
	}
	all := make(map[string]types.ResourceWithTTL, len(s.all))
	for name, r := range s.all {
		all[name] = types.ResourceWithTTL{Resource: r}
	}
	return all
}

func (s *snapshot) GetResources(typ string) map[string]types.Resource {
	if typ != workloadEntry {
		return nil
	}
	return s.all
}

// ConstructVersionMap does what that of go-control-plane's own snapshot does.
func (s *snapshot) ConstructVersionMap() error {
	if s.versions != nil {
		return nil
	}
	s.versions = make(map[string]string, len(s.all))
	for name, r := range s.all {
		b, err := cache.MarshalResource(r)
		if err != nil {
			return err
		}
		s.versions[name] = cache.HashResource(b)
	}
	return nil
}

func (s *snapshot) GetVersionMap(typ string) map[string]string {
	if typ != workloadEntry {
		return nil
	}
	return s.versions
}

// bare sends encoded messages.
type bare struct {
	mu    sync.Mutex
	all   map[string]*discovery.Resource
	sinks []chan []*discovery.Resource
}

func newBare(all map[string]*mcp.Resource) (*bare, error) {
	b := &bare{all: make(map[string]*discovery.Resource, len(all))}
	for name, r := range all {
		encoded, err := encode(name, r)
		if err != nil {
			return nil, err
		}
		b.all[name] = encoded
	}
	return b, nil
}

func encode(name string, r *mcp.Resource) (*discovery.Resource, error) {
	value, err := proto.Marshal(r)
	return &discovery.Resource{Name: name, Version: r.GetMetadata().GetVersion(), Resource: &anypb.Any{TypeUrl: "type.googleapis.com/istio.mcp.v1alpha1.Resource", Value: value}}, err
}

func (b *bare) set(name string, r *mcp.Resource) error {
	encoded, err := encode(name, r)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all[name] = encoded
	for _, sink := range b.sinks {
		sink <- []*discovery.Resource{encoded}
	}
	return nil
}

func (b *bare) register(s *grpc.Server) { discovery.RegisterAggregatedDiscoveryServiceServer(s, b) }

func (b *bare) StreamAggregatedResources(discovery.AggregatedDiscoveryService_StreamAggregatedResourcesServer) error {
	return errors.New("bare has delta only")
}

func (b *bare) DeltaAggregatedResources(stream discovery.AggregatedDiscoveryService_DeltaAggregatedResourcesServer) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		if r.GetTypeUrl() == workloadEntry {
			break
		}
	}
	go func() {
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	}()
	changes := make(chan []*discovery.Resource, 1<<16)
	b.mu.Lock()
	var first []*discovery.Resource
	for _, r := range b.all {
		first = append(first, r)
	}
	b.sinks = append(b.sinks, changes)
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.sinks = slices.DeleteFunc(b.sinks, func(c chan []*discovery.Resource) bool { return c == changes })
	}()
	for part := range slices.Chunk(first, 10_000) {
		if err := stream.Send(&discovery.DeltaDiscoveryResponse{TypeUrl: workloadEntry, Nonce: "1", Resources: part}); err != nil {
			return err
		}
	}
	for {
		select {
		case <-stream.Context().Done():
			return nil
		case part := <-changes:
			if err := stream.Send(&discovery.DeltaDiscoveryResponse{TypeUrl: workloadEntry, Nonce: "1", Resources: part}); err != nil {
				return err
			}
		}
	}
}
