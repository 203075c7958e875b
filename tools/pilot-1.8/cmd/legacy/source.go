package main

import (
	"flag"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/gogo/protobuf/types"
	"google.golang.org/grpc"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"istio.io/istio/pkg/config/schema/collections"
	"istio.io/istio/pkg/mcp/rate"
	"istio.io/istio/pkg/mcp/server"
	"istio.io/istio/pkg/mcp/snapshot"
	"istio.io/istio/pkg/mcp/source"
	"istio.io/istio/pkg/mcp/testing/groups"
	"istio.io/istio/pkg/mcp/testing/monitoring"
)

const entries = "istio/networking/v1alpha3/serviceentries"

// entry is the i-th of the entries, with the weight of its first endpoint.
func entry(i, endpoints int, weight uint32) *networking.ServiceEntry {
	e := &networking.ServiceEntry{
		Hosts:      []string{fmt.Sprintf("service-%d.example.org", i)},
		Ports:      []*networking.Port{{Number: 80, Name: "http", Protocol: "HTTP"}},
		Resolution: networking.ServiceEntry_STATIC,
	}
	for n := 0; n < endpoints; n++ {
		w := &networking.WorkloadEntry{
			Address: fmt.Sprintf("10.%d.%d.%d", i>>8&255, i&255, n+1), Ports: map[string]uint32{"http": 8080},
			Labels: map[string]string{"isthmus.io/service": fmt.Sprintf("service-%d", i)}, Weight: 1,
		}
		if n == 0 {
			w.Weight = weight
		}
		e.Endpoints = append(e.Endpoints, w)
	}
	return e
}

// world is a snapshot that shares what did not change with the one before. (The
// library's own snapshot.InMemory copies every resource for each version, which
// is not what is compared here.)
type world struct {
	version   string
	resources []*mcpapi.Resource
}

// Collections implements snapshot.Snapshot.
func (s *world) Collections() []string { return []string{entries} }

// Resources implements snapshot.Snapshot.
func (s *world) Resources(collection string) []*mcpapi.Resource {
	if collection == entries {
		return s.resources
	}
	return nil
}

// Version implements snapshot.Snapshot.
func (s *world) Version(collection string) string {
	if collection == entries {
		return s.version
	}
	return "0"
}

func resource(i int, version string, annotations map[string]string, e *networking.ServiceEntry) (*mcpapi.Resource, error) {
	body, err := types.MarshalAny(e)
	if err != nil {
		return nil, err
	}
	return &mcpapi.Resource{
		Metadata: &mcpapi.Metadata{Name: name(i), CreateTime: &types.Timestamp{Seconds: 1_600_000_000}, Version: version, Annotations: annotations},
		Body:     body,
	}, nil
}

// stamped is the i-th resource, whose first endpoint carries the time of its
// change in nanoseconds since 1970.
func stamped(i, version, endpoints int, now time.Time) (*mcpapi.Resource, error) {
	e := entry(i, endpoints, uint32(version)+1)
	e.Endpoints[0].Labels["changed-at"] = strconv.FormatInt(now.UnixNano(), 10)
	return resource(i, strconv.Itoa(version), nil, e)
}

// change makes changes, each at its time.
func change(total int, perSecond float64, set func(version int, now time.Time)) {
	begin := time.Now()
	for n := 0; n < total; n++ {
		time.Sleep(time.Until(begin.Add(time.Duration(float64(n) / perSecond * float64(time.Second)))))
		set(n+1, time.Now())
	}
}

func name(i int) string { return fmt.Sprintf("dc1/service-%d", i) }

func runSource(args []string) error {
	flags := flag.NewFlagSet("source", flag.ExitOnError)
	count := flags.Int("entries", 1000, "number of entries")
	endpoints := flags.Int("endpoints", 10, "endpoints of each")
	incremental := flags.Bool("incremental", false, "allow incremental responses")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var cols []source.CollectionOptions
	for _, s := range collections.Pilot.All() {
		cols = append(cols, source.CollectionOptions{Name: s.Name().String(), Incremental: *incremental})
	}
	current := &world{version: "0"}
	for i := 0; i < *count; i++ {
		r, err := resource(i, "0", nil, entry(i, *endpoints, 1))
		if err != nil {
			return err
		}
		current.resources = append(current.resources, r)
	}
	cache := snapshot.New(groups.DefaultIndexFn)
	cache.SetSnapshot(groups.Default, current)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	mcpapi.RegisterResourceSourceServer(s, source.NewServer(&source.Options{
		Watcher: cache, CollectionsOptions: cols, Reporter: monitoring.NewInMemoryStatsContext(),
		ConnRateLimiter: rate.NewRateLimiter(time.Microsecond, 1_000_000),
	}, &source.ServerOptions{AuthChecker: server.NewAllowAllChecker(), RateLimiter: rate.NewRateLimiter(time.Microsecond, 1000).Create()}))
	go func() { _ = s.Serve(l) }()
	answer(map[string]string{"address": l.Addr().String()})
	version := 0
	return commands(func(line string) error {
		var perSecond float64
		var total int
		if n, _ := fmt.Sscanf(line, "run %g %d", &perSecond, &total); n == 2 {
			go change(total, perSecond, func(version int, now time.Time) {
				r, err := stamped(version%*count, version, *endpoints, now)
				if err != nil {
					fail(err)
				}
				next := &world{version: strconv.Itoa(version), resources: append([]*mcpapi.Resource(nil), current.resources...)}
				next.resources[version%*count] = r
				current = next
				cache.SetSnapshot(groups.Default, current)
			})
			return nil
		}
		switch line {
		case "update":
			version++
			v := strconv.Itoa(version)
			now := time.Now().UnixNano()
			i := version % *count
			r, err := resource(i, v, map[string]string{publishedAnnotation: strconv.FormatInt(now, 10)}, entry(i, *endpoints, uint32(version)+1))
			if err != nil {
				return err
			}
			next := &world{version: v, resources: append([]*mcpapi.Resource(nil), current.resources...)}
			next.resources[i] = r
			current = next
			cache.SetSnapshot(groups.Default, current)
			answer(map[string]int64{"published": now})
		case "cpu":
			var u syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
				return err
			}
			answer(map[string]int64{"cpu": u.Utime.Nano() + u.Stime.Nano()})
		default:
			return fmt.Errorf("no such command: %q", line)
		}
		return nil
	})
}
