// Command source is the bridge from the store on, in a process of its own, so that its CPU time can be told. It takes the same commands as
// tools/pilot-1.8/cmd/legacy source and answers alike: "update" changes one endpoint of one entry, "cpu" tells the CPU time in nanoseconds.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/push"
	"github.com/isthmus-mesh/isthmus/server/resource"
	"github.com/isthmus-mesh/isthmus/server/store"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "source:", err)
		os.Exit(1)
	}
}

func part(name, published string, body proto.Message) (*resource.Part, error) {
	a, err := anypb.New(body)
	if err != nil {
		return nil, err
	}
	meta := &mcpapi.Metadata{Name: name, CreateTime: &timestamppb.Timestamp{Seconds: 1_600_000_000}}
	if published != "" {
		meta.Annotations = map[string]string{"published": published}
	}
	raw, err := proto.Marshal(&mcpapi.Resource{Metadata: meta, Body: a})
	if err != nil {
		return nil, err
	}
	return resource.Parse(raw)
}

type service struct {
	name string
	i    int
	svc  *resource.Service
}

func (s *service) entry(published string) error {
	p, err := part("dc1/"+s.name, published, &networking.ServiceEntry{
		Hosts: []string{s.name + ".example.org"}, Resolution: networking.ServiceEntry_STATIC,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	})
	if err == nil {
		s.svc.SetEntry(p)
	}
	return err
}

func (s *service) instance(n int, weight uint32) error {
	p, err := part(fmt.Sprintf("dc1/%s-%d", s.name, n), "", &networking.WorkloadEntry{
		Address: fmt.Sprintf("10.%d.%d.%d", s.i>>8&255, s.i&255, n+1), Ports: map[string]uint32{"http": 8080}, Weight: weight,
	})
	if err == nil {
		s.svc.SetInstance(p)
	}
	return err
}

func (s *service) op() store.Op[*resource.Resource] {
	return store.Op[*resource.Resource]{Collection: collection.ServiceEntry, Name: "dc1/" + s.name, Value: s.svc.Resource(resource.Inline)}
}

func run() error {
	count := flag.Int("entries", 1000, "number of entries")
	endpoints := flag.Int("endpoints", 10, "endpoints of each")
	incremental := flag.Bool("incremental", false, "allow incremental responses")
	flag.Parse()
	st := store.New[*resource.Resource](store.Options{})
	var services []*service
	var ops []store.Op[*resource.Resource]
	for i := range *count {
		s := &service{name: fmt.Sprintf("service-%d", i), i: i}
		s.svc = resource.NewService("dc1", s.name)
		if err := s.entry(""); err != nil {
			return err
		}
		for n := range *endpoints {
			if err := s.instance(n, 1); err != nil {
				return err
			}
		}
		services, ops = append(services, s), append(ops, s.op())
	}
	st.Apply(ops)
	m, err := mcp.New(push.NewHub(st, func(string) bool { return true }), mcp.Config{FullState: !*incremental}, nil, nil)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := grpc.NewServer(xds.ServerOptions()...)
	m.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }() // ends with Stop
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(map[string]string{"address": l.Addr().String()}); err != nil {
		return err
	}
	updates := 0
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var answer any
		switch lines.Text() {
		case "update":
			updates++
			now := time.Now().UnixNano()
			s := services[updates%len(services)]
			if err := s.entry(strconv.FormatInt(now, 10)); err != nil {
				return err
			}
			if err := s.instance(0, uint32(updates)+1); err != nil { //nolint:gosec // a few thousand at most
				return err
			}
			st.Apply([]store.Op[*resource.Resource]{s.op()})
			answer = map[string]int64{"published": now}
		case "cpu":
			var u syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
				return err
			}
			answer = map[string]int64{"cpu": u.Utime.Nano() + u.Stime.Nano()}
		default:
			return fmt.Errorf("no such command: %q", lines.Text())
		}
		if err := out.Encode(answer); err != nil {
			return err
		}
	}
	server.Stop()
	return errors.Join(lines.Err(), <-served)
}
