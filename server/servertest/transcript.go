package servertest

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

var update = flag.Bool("update", false, "write the transcripts of testdata/*.txtar anew")

// Transcript plays one script against a server and records what travels in both
// directions. Time is fake; after each line the transcript waits until all
// goroutines of the server and of the client are blocked.
//
// These commands are common to all protocols:
//
//	config WORD...                    configures the server; first line only
//	entry NAME HOST [dns] [PORT=NUMBER]...
//	                                  sets a service
//	instance SERVICE NAME ADDRESS [WEIGHT] [PORT=NUMBER]...
//	                                  sets an instance
//	crowd SERVICE COUNT BYTES         sets instances of about so many bytes each
//	drop SERVICE NAME, remove NAME    remove an instance, a service
//	gateway NAME                      sets a Gateway
//	many COUNT BYTES                  sets services of about so many bytes each
//	hold COLLECTION, open COLLECTION  makes the first listing incomplete, complete
//	stream NAME [WORD...]             opens a stream
//	NAME close, NAME cancel           closes the client's side, cancels the stream
//	NAME WORD...                      sends a request; the protocol defines the words
//	wait DURATION                     lets time pass
//	status                            prints the status of all streams
//	shutdown                          shuts the server down
type Transcript struct {
	T     *testing.T
	World *World
	// Log is the server's log. Its warnings are part of the transcript.
	Log *slog.Logger

	out      strings.Builder
	started  time.Time
	warnings chan string
	server   Server
	protocol Protocol
	conn     *grpc.ClientConn
	streams  []*Stream
}

// Server is a server under test.
type Server interface {
	Register(r grpc.ServiceRegistrar)
	Status() []stream.Status
	Drain(over time.Duration)
}

// Protocol is the client's side of one protocol.
type Protocol interface {
	// Open returns the gRPC method of a stream that is about to be opened, and
	// its client. The words are those that follow the stream's name.
	Open(s *Stream, words []string) (method string, c Client)
	// Status prints the status of a stream.
	Status(s stream.Status)
}

// Client is the client's side of one stream.
type Client interface {
	// Request sends the request that a line describes.
	Request(line string)
	// New returns an empty response.
	New() proto.Message
	// Response prints a response, or the error that ended the stream.
	Response(m proto.Message, err error)
}

// Stream is one stream of a transcript.
type Stream struct {
	grpc.ClientStream
	Name string

	client Client
	cancel context.CancelFunc
	got    chan received
}

type received struct {
	m   proto.Message
	err error
}

// Setup makes the server and the protocol of a transcript. The words are those
// of the line config. The server needs the gRPC options that are returned.
type Setup func(tr *Transcript, config []string) (Server, Protocol, []grpc.ServerOption, []grpc.DialOption)

// RunTranscripts plays the script of each testdata/*.txtar and compares what
// travelled, line for line, with the transcript of the same file. The flag
// -update writes the transcripts anew.
func RunTranscripts(t *testing.T, setup Setup) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, error %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if len(a.Files) != 2 || a.Files[0].Name != "script" || a.Files[1].Name != "transcript" {
				t.Fatalf("%s must hold the files script and transcript", file)
			}
			got := play(t, string(a.Files[0].Data), setup)
			if *update {
				a.Files[1].Data = []byte(got)
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if d := cmp.Diff(strings.Split(string(a.Files[1].Data), "\n"), strings.Split(got, "\n")); d != "" {
				t.Errorf("(-want +got), -update accepts it:\n%s", d)
			}
		})
	}
}

func play(t *testing.T, script string, setup Setup) (out string) {
	synctest.Test(t, func(t *testing.T) {
		tr := &Transcript{T: t, World: New(t, state.Options{Tombstones: 4}), started: time.Now(), warnings: make(chan string, 1000)}
		tr.Log = slog.New(warnings{slog.NewTextHandler(t.Output(), nil), tr.warnings})
		var config []string
		if first, rest, _ := strings.Cut(script, "\n"); strings.HasPrefix(first, "config ") {
			config, script = strings.Fields(first)[1:], rest
		}
		var options []grpc.ServerOption
		var dial []grpc.DialOption
		tr.server, tr.protocol, options, dial = setup(tr, config)
		server := grpc.NewServer(options...)
		tr.server.Register(server)
		conn, stop := Connect(t, server, dial...)
		defer stop()
		defer tr.World.Follow()()
		tr.conn = conn
		for line := range strings.Lines(script) {
			line = strings.TrimSpace(line)
			switch {
			case line == "":
			case strings.HasPrefix(line, "#"):
				tr.Printf("%s\n", line)
			default:
				tr.step(line)
				tr.collect()
			}
		}
		for _, s := range tr.streams {
			s.cancel()
		}
		out = tr.out.String()
	})
	return out
}

// Printf adds to the transcript.
func (tr *Transcript) Printf(format string, args ...any) { fmt.Fprintf(&tr.out, format, args...) }

// JSON returns v as JSON without insignificant spaces. A protobuf message is
// encoded by protojson.
func (tr *Transcript) JSON(v any) []byte {
	tr.T.Helper()
	var raw []byte
	var err error
	if m, ok := v.(proto.Message); ok {
		raw, err = protojson.Marshal(m)
	} else {
		raw, err = json.Marshal(v)
	}
	tr.Must(err)
	var b bytes.Buffer
	tr.Must(json.Compact(&b, raw)) // protojson varies its spaces on purpose
	return b.Bytes()
}

// Must ends the test if there is an error.
func (tr *Transcript) Must(err error) {
	tr.T.Helper()
	if err != nil {
		tr.T.Fatal(err)
	}
}

// Number reads a number of a script.
func (tr *Transcript) Number(s string) int {
	tr.T.Helper()
	n, err := strconv.ParseUint(s, 10, 31)
	tr.Must(err)
	return int(n)
}

// Since returns how long the transcript has been running.
func (tr *Transcript) Since() time.Duration { return time.Since(tr.started).Round(time.Millisecond) }

// ports reads words of the form PORT=NUMBER.
func (tr *Transcript) ports(words []string) (ports []Port) {
	tr.T.Helper()
	for _, word := range words {
		name, number, _ := strings.Cut(word, "=")
		ports = append(ports, Port{Name: name, Number: uint32(tr.Number(number))}) //nolint:gosec // of 31 bits
	}
	return ports
}

// step runs one line of a script.
func (tr *Transcript) step(line string) {
	tr.T.Helper()
	f, w := strings.Fields(line), tr.World
	if i := slices.IndexFunc(tr.streams, func(s *Stream) bool { return s.Name == f[0] }); i >= 0 {
		s, rest := tr.streams[i], strings.TrimSpace(strings.TrimPrefix(line, f[0]))
		switch rest {
		case "close":
			tr.Printf("%s > close\n", s.Name)
			tr.Must(s.CloseSend())
		case "cancel":
			tr.Printf("%s > cancel\n", s.Name)
			s.cancel()
		default:
			s.client.Request(rest)
		}
		return
	}
	tr.Printf("%s\n", line)
	switch f[0] {
	case "entry":
		resolution, rest := networking.ServiceEntry_STATIC, f[3:]
		if len(rest) > 0 && rest[0] == "dns" {
			resolution, rest = networking.ServiceEntry_DNS, rest[1:]
		}
		w.EntryOf(f[1], f[2], resolution, tr.ports(rest)...)
	case "instance":
		weight, rest := 0, f[4:]
		if len(rest) > 0 && !strings.Contains(rest[0], "=") {
			weight, rest = tr.Number(rest[0]), rest[1:]
		}
		w.Instance(f[1], f[2], f[3], uint32(weight), tr.ports(rest)...) //nolint:gosec // of 31 bits
	case "crowd":
		w.Crowd(f[1], tr.Number(f[2]), tr.Number(f[3]))
	case "drop":
		w.Drop(f[2])
	case "remove":
		w.Remove(f[1])
	case "gateway":
		w.Publish(f[1], &networking.Gateway{Selector: map[string]string{"app": f[1]}})
	case "many":
		for i := range tr.Number(f[1]) {
			w.Publish(fmt.Sprintf("dc1/s%d", i), &networking.ServiceEntry{Hosts: []string{strings.Repeat("x", tr.Number(f[2]))}})
		}
	case "hold", "open":
		w.Hold(f[1], f[0] == "hold")
	case "wait":
		d, err := time.ParseDuration(f[1])
		tr.Must(err)
		<-time.After(d)
	case "stream":
		tr.open(f[1], f[2:])
	case "shutdown":
		tr.server.Drain(0)
	case "status":
		synctest.Wait()
		for _, s := range tr.server.Status() {
			s.Connected = s.Connected.UTC()
			tr.protocol.Status(s)
		}
	default:
		tr.T.Fatalf("script: %s", line)
	}
}

// open opens a stream. It replaces an earlier one of the same name.
func (tr *Transcript) open(name string, words []string) {
	tr.T.Helper()
	ctx, cancel := context.WithCancel(tr.T.Context())
	s := &Stream{Name: name, cancel: cancel, got: make(chan received, 1000)}
	method, client := tr.protocol.Open(s, words)
	stream, err := tr.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	tr.Must(err)
	s.ClientStream, s.client = stream, client
	go func() { // ends with the stream, at the latest when the connection is closed
		for {
			m := client.New()
			err := stream.RecvMsg(m)
			s.got <- received{m, err}
			if err != nil {
				return
			}
		}
	}()
	tr.streams = append(slices.DeleteFunc(tr.streams, func(o *Stream) bool { return o.Name == name }), s)
}

// collect waits until all goroutines are blocked and prints what was received.
func (tr *Transcript) collect() {
	tr.T.Helper()
	synctest.Wait()
	for len(tr.warnings) > 0 {
		tr.Printf("%s\n", <-tr.warnings)
	}
	for _, s := range tr.streams {
		for len(s.got) > 0 {
			r := <-s.got
			s.client.Response(r.m, r.err)
		}
	}
}

// warnings copies the records of level warning and above to a channel.
type warnings struct {
	slog.Handler
	to chan<- string
}

func (w warnings) WithAttrs(a []slog.Attr) slog.Handler {
	return warnings{w.Handler.WithAttrs(a), w.to}
}

func (w warnings) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelWarn {
		var b strings.Builder
		fmt.Fprintf(&b, "log: %s", r.Message)
		r.Attrs(func(a slog.Attr) bool {
			fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
			return true
		})
		w.to <- b.String()
	}
	return w.Handler.Handle(ctx, r)
}

// Connect serves a gRPC server over an in-memory connection until stop is
// called, and returns a client's connection to it.
func Connect(t testing.TB, server *grpc.Server, options ...grpc.DialOption) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends with stop
	conn, err := grpc.NewClient("passthrough:///bufconn", append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1 << 30)),
	}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	return conn, func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}
