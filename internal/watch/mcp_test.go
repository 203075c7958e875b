package watch_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/internal/watch"
	legacy "github.com/isthmus-mesh/isthmus/server/mcp"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/xds"
)

// legacySource is a store served over the legacy protocol.
type legacySource struct {
	t       *testing.T
	w       *servertest.World
	server  *legacy.Server
	address string
	stop    func()
}

func newLegacySource(t *testing.T) *legacySource {
	t.Helper()
	s := &legacySource{t: t, w: servertest.New(t, state.Options{})}
	var err error
	if s.server, err = legacy.New(s.w.View, legacy.Config{}, nil, nil); err != nil {
		t.Fatal(err)
	}
	s.serve("127.0.0.1:0")
	t.Cleanup(func() { s.stop() })
	return s
}

func (s *legacySource) serve(address string) {
	s.t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		s.t.Fatal(err)
	}
	s.address = l.Addr().String()
	server := grpc.NewServer(xds.ServerOptions()...)
	s.server.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }() // ends with stop
	s.stop = func() {
		s.stop = func() {}
		server.Stop()
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			s.t.Error(err)
		}
	}
}

// set sets an entry, or with host "" removes it.
func (s *legacySource) set(name, host string) {
	s.t.Helper()
	if host == "" {
		s.w.Remove(name)
		return
	}
	s.w.Publish(name, &networking.ServiceEntry{Hosts: []string{host}})
}

// lines is what a watch prints, line by line.
type lines struct {
	t    *testing.T
	read *bufio.Reader
}

func (l lines) next() string {
	l.t.Helper()
	got := make(chan string, 1)
	go func() { // ends with the line, or with the pipe at the end of the test
		s, _ := l.read.ReadString('\n')
		got <- strings.TrimSpace(s)
	}()
	return testwait.Receive(l.t, 30*time.Second, "a line", got)
}

// want reads a line of JSON and compares operation, name and number of
// response.
func (l lines) want(want string) {
	l.t.Helper()
	var line watch.Line
	text := l.next()
	if err := json.Unmarshal([]byte(text), &line); err != nil {
		l.t.Fatalf("%v: %s", err, text)
	}
	if got := fmt.Sprintf("%d %s %s %s", line.Push, line.Op, line.Collection, line.Name); got != want {
		l.t.Errorf("printed %q, want %q", got, want)
	}
}

// runLegacy runs a watch until the test ends.
func runLegacy(t *testing.T, o watch.Options) (stdout, stderr lines) {
	t.Helper()
	outR, outW := io.Pipe()
	errR, errW := io.Pipe()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	o.Protocol, o.Output, o.Stderr = "mcp", "json", errW
	go func() { ended <- watch.Run(ctx, o, outW) }() // ends with cancel below
	t.Cleanup(func() {
		cancel()
		outR.Close()
		errR.Close()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return lines{t, bufio.NewReader(outR)}, lines{t, bufio.NewReader(errR)}
}

const legacyEntries = "istio/networking/v1alpha3/serviceentries"

// A watch of the legacy protocol prints what a Pilot would get, in both modes,
// as one line per change; after a reconnect it prints only what changed.
func TestLegacy(t *testing.T) {
	for _, incremental := range []bool{false, true} {
		t.Run(fmt.Sprintf("incremental=%v", incremental), func(t *testing.T) {
			s := newLegacySource(t)
			s.set("ns/a", "a.example.org")
			stdout, stderr := runLegacy(t, watch.Options{Address: s.address, Incremental: incremental})
			stdout.want("1 upsert " + legacyEntries + " ns/a")
			s.set("ns/b", "b.example.org")
			stdout.want("2 upsert " + legacyEntries + " ns/b")
			s.set("ns/a", "")
			stdout.want("3 remove " + legacyEntries + " ns/a")
			address := s.address
			s.stop()
			if line := stderr.next(); !strings.Contains(line, "connecting again") {
				t.Errorf("stderr: %s", line)
			}
			s.set("ns/c", "c.example.org")
			go func() { // ends with the pipe
				for {
					if _, err := stderr.read.ReadString('\n'); err != nil {
						return
					}
				}
			}()
			s.serve(address)
			stdout.want("4 upsert " + legacyEntries + " ns/c")
			st := s.server.Status()
			if len(st) != 1 || st[0].Subscriptions[0].Incremental != incremental {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// In reverse mode the watch waits to be dialled, refuses the trigger, and
// prints what comes.
func TestLegacyListen(t *testing.T) {
	s := newLegacySource(t)
	s.set("ns/a", "a.example.org")
	stdout, stderr := runLegacy(t, watch.Options{Listen: "127.0.0.1:0", Incremental: true})
	address, ok := strings.CutPrefix(stderr.next(), "listening at ")
	if !ok {
		t.Fatal("it does not say where it listens")
	}
	ctx, cancel := context.WithCancel(context.Background())
	dialled := make(chan error, 1)
	go func() { dialled <- s.server.Dial(ctx, legacy.Sink{Address: address}) }() // ends with cancel
	stdout.want("1 upsert " + legacyEntries + " ns/a")
	s.set("ns/b", "b.example.org")
	stdout.want("2 upsert " + legacyEntries + " ns/b")
	cancel()
	if err := <-dialled; !errors.Is(err, context.Canceled) {
		t.Errorf("Dial: %v", err)
	}
	if line := stderr.next(); !strings.Contains(line, "waiting for another") {
		t.Errorf("stderr: %s", line)
	}
}

// Options that do not go together are refused.
func TestLegacyOptions(t *testing.T) {
	for _, tt := range []struct {
		o    watch.Options
		want string
	}{
		{watch.Options{Address: "x", Listen: "y", Protocol: "mcp"}, "listen: is for reverse mode"},
		{watch.Options{Listen: "y"}, "need the protocol mcp"},
		{watch.Options{Address: "x", Incremental: true, Protocol: "sotw"}, "need the protocol mcp"},
		{watch.Options{Address: "x", SinkID: new("y")}, "need the protocol mcp"},
		{watch.Options{Address: "x", Shape: "inline", Protocol: "mcp"}, "shape: the protocol mcp has no choice"},
		{watch.Options{Protocol: "mcp"}, "address: is missing"},
		{watch.Options{Address: "x", Protocol: "foo"}, "must be sotw, delta or mcp"},
	} {
		if err := watch.Run(t.Context(), tt.o, io.Discard); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: error %v, want one with %q", tt.o, err, tt.want)
		}
	}
}
