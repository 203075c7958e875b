// Command source is the bridge from the store on, in a process of its own, so
// that its CPU time can be told. It takes the same commands as
// tools/pilot-1.8/cmd/legacy source and answers alike: "update" changes one
// endpoint of one entry, "cpu" tells the CPU time in nanoseconds.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcpapi "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "source:", err)
		os.Exit(1)
	}
}

func upsert(service, name, published string, body proto.Message) (*pluginv1.Upsert, error) {
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
	return &pluginv1.Upsert{Service: service, Resource: raw}, nil
}

func entry(i int, published string) (*pluginv1.Upsert, error) {
	name := fmt.Sprintf("service-%d", i)
	return upsert("dc1/"+name, "dc1/"+name, published, &networking.ServiceEntry{
		Hosts: []string{name + ".example.org"}, Resolution: networking.ServiceEntry_STATIC,
		Ports: []*networking.ServicePort{{Number: 80, Name: "http", Protocol: "HTTP"}},
	})
}

func instance(i, n int, weight uint32) (*pluginv1.Upsert, error) {
	name := fmt.Sprintf("dc1/service-%d", i)
	return upsert(name, fmt.Sprintf("%s-%d", name, n), "", &networking.WorkloadEntry{
		Address: fmt.Sprintf("10.%d.%d.%d", i>>8&255, i&255, n+1), Ports: map[string]uint32{"http": 8080}, Weight: weight,
	})
}

func run() error {
	count := flag.Int("entries", 1000, "number of entries")
	endpoints := flag.Int("endpoints", 10, "endpoints of each")
	incremental := flag.Bool("incremental", false, "allow incremental responses")
	flag.Parse()
	db := state.New([]string{"dc1"}, state.Options{}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	dc1 := db.Registry("dc1")
	for i := range *count {
		e, err := entry(i, "")
		if err != nil {
			return err
		}
		batch := &pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{e}}
		for n := range *endpoints {
			e, err := instance(i, n, 1)
			if err != nil {
				return err
			}
			batch.Upserts = append(batch.Upserts, e)
		}
		if err := dc1.Apply(batch); err != nil {
			return err
		}
	}
	if err := dc1.Apply(&pluginv1.WatchResponse{Synced: true}); err != nil {
		return err
	}
	m, err := mcp.New(view.New(db), mcp.Config{FullState: !*incremental}, nil, nil)
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
			e, err := entry(updates%*count, strconv.FormatInt(now, 10))
			if err != nil {
				return err
			}
			in, err := instance(updates%*count, 0, uint32(updates)+1) //nolint:gosec // a few thousand at most
			if err != nil {
				return err
			}
			if err := dc1.Apply(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{e, in}}); err != nil {
				return err
			}
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
