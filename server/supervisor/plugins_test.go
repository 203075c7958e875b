package supervisor_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// The test binary is the plugin too, and a host that can be killed: the
// variable says which.
const roleKey = "ISTHMUS_TEST_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleKey)
	if strings.HasPrefix(role, stepPrefix) {
		stepMain(role)
	}
	if of, call, ok := strings.Cut(role, " without "); ok {
		lack(call)
		role = of
	}
	switch role {
	case "":
		goleak.VerifyTestMain(m)
	case "host":
		hostMain()
	case "captive":
		plugin.Main("captive", newCaptive, plugin.WithAccess(captiveConfig.access))
	case "remote":
		plugin.Main("remote", newRemote, plugin.WithDefaults(remoteConfig{Greeting: "hello"}), plugin.WithVersion("1.2.3"))
	default:
		rogueMain(role)
	}
}

// spec runs this binary in a role.
func spec(role string, config any) supervisor.Spec {
	b, err := json.Marshal(config)
	if err != nil {
		panic(err)
	}
	return supervisor.Spec{
		Registry: "test",
		Command:  []string{os.Args[0]},
		Env:      []string{roleKey + "=" + role},
		Config:   b,
	}
}

// remote is an adapter that does what the test tells it over a Unix socket: one
// command a line, answered with "ok".
type remote struct {
	env      plugin.Env
	listener net.Listener

	counted plugin.Counter
	held    plugin.Gauge
}

type remoteConfig struct {
	Socket   string          `json:"socket" jsonschema:"required" jsonschema_description:"Path of the Unix socket."`
	Greeting string          `json:"greeting,omitempty"`
	Wait     plugin.Duration `json:"wait,omitempty"`
	Token    plugin.Secret   `json:"token,omitempty"`
}

func (c remoteConfig) Validate() error {
	if c.Greeting == "rude" {
		return &plugin.FieldError{Field: "greeting", Reason: "be polite"}
	}
	return nil
}

func newRemote(c remoteConfig, env plugin.Env) (plugin.Adapter, error) {
	switch c.Greeting {
	case "panic":
		panic("greeted with panic")
	case "print":
		fmt.Println("printed to stdout")
		fmt.Fprintln(os.Stderr, "printed to stderr")
		log.SetFlags(0)
		log.Println("printed by log")
		env.Log.Warn("logged", slog.Int("number", 7), slog.String("registry", "x"))
		env.Log.Debug("not to be seen")
		fmt.Fprintln(os.Stderr, `{"@level":"error","@message":5}`)
	}
	_ = os.Remove(c.Socket)
	l, err := net.Listen("unix", c.Socket)
	if err != nil {
		return nil, &plugin.FieldError{Field: "socket", Reason: err.Error()}
	}
	return &remote{env, l, env.Metrics.Counter("asked_total", "Requests to the registry."), env.Metrics.Gauge("held", "What is held.")}, nil
}

type command struct {
	Op        string
	Name      string
	Instances int
	Change    int // an instance whose weight differs
}

func (r *remote) Run(ctx context.Context, c plugin.Catalog) error {
	defer context.AfterFunc(ctx, func() { _ = r.listener.Close() })()
	for {
		conn, err := r.listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		lines := bufio.NewScanner(conn)
		for lines.Scan() {
			var cmd command
			if err := json.Unmarshal(lines.Bytes(), &cmd); err != nil {
				return err
			}
			if err := r.do(c, cmd); err != nil {
				return err
			}
			fmt.Fprintln(conn, "ok")
		}
		_ = conn.Close()
	}
}

func (r *remote) do(c plugin.Catalog, cmd command) error {
	switch cmd.Op {
	case "set":
		var in []registry.Instance
		for i := range cmd.Instances {
			in = append(in, registry.Instance{ID: fmt.Sprint(i), Address: fmt.Sprintf("10.0.%d.%d", i/200, i%200+1), Ports: []registry.Port{{Number: 8080}}})
		}
		if cmd.Change > 0 {
			in[cmd.Change].Weight = new(9.0)
		}
		c.Set(registry.Service{Key: registry.Key{Name: cmd.Name}}, in)
	case "remove":
		c.Remove(registry.Key{Name: cmd.Name})
	case "synced":
		c.Synced()
	case "degraded":
		c.Degraded(errors.New(cmd.Name))
	case "heard":
		c.Heard()
	case "count":
		r.counted.Add(float64(cmd.Instances))
		r.held.Set(float64(cmd.Change))
	case "followed":
		c.Degraded(nil)
	case "fail":
		return errors.New(cmd.Name)
	case "panic":
		panic(cmd.Name)
	case "eat":
		for {
			eaten = append(eaten, bytes.Repeat([]byte{1}, 1<<20))
		}
	case "crash":
		go func() { panic(cmd.Name) }()
		select {}
	}
	return nil
}

// eaten is what a remote holds that takes memory without end.
var eaten [][]byte

// tell gives a remote a command and waits until it was done.
func tell(t testing.TB, socket string, cmds ...command) {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	in := bufio.NewReader(conn)
	for _, cmd := range cmds {
		b, err := json.Marshal(cmd)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(append(b, '\n')); err != nil {
			t.Fatal(err)
		}
		if _, err := in.ReadString('\n'); err != nil && cmd.Op != "panic" && cmd.Op != "fail" && cmd.Op != "crash" && cmd.Op != "eat" {
			t.Fatal(err)
		}
	}
}

// chattyLines is how many lines the rogue "chatty" writes, besides two odd
// ones.
const chattyLines = 20_000

// floodKey is the variable that names the file in which the rogue "flood"
// counts what it has sent.
const floodKey = "ISTHMUS_TEST_FLOOD"

// floodMessage is the size of each of its messages, less what surrounds the
// resources.
const floodMessage = 1_000_000

// rogueMain is a plugin that does not use the SDK and misbehaves.
func rogueMain(role string) {
	switch role {
	case "silent": // never says its handshake
		select {}
	case "junk":
		fmt.Println("this is not a handshake")
		select {}
	case "exits":
		fmt.Fprintln(os.Stderr, "cannot go on")
		os.Exit(3)
	case "stubborn": // does not end
		signal.Ignore(syscall.SIGTERM)
	case "flood-stderr": // never says its handshake, and much else
		for {
			fmt.Fprintln(os.Stderr, strings.Repeat("noise ", 20))
		}
	case "flood-stdout": // the same without a line break, where the handshake should be
		for {
			fmt.Print(strings.Repeat("noise ", 20))
		}
	case "chatty":
		for range chattyLines {
			fmt.Fprintln(os.Stderr, strings.Repeat("noise ", 20))
		}
		fmt.Fprintln(os.Stderr, `{"@message":5,"@level":{}}`)
		fmt.Fprint(os.Stderr, strings.Repeat("x", 300_000))
	}
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig:  wire.Handshake,
		VersionedPlugins: wire.Plugins(&rogue{role: role}),
		Logger:           hclog.NewNullLogger(),
		GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
			return grpc.NewServer(append(opts, grpc.ForceServerCodec(rogueCodec{encoding.GetCodec("proto")}))...)
		},
	})
	if role == "stubborn" {
		select {}
	}
}

type rogue struct {
	pluginv1.UnimplementedAdapterServiceServer
	role string
}

// rogueCodec sends a message whose only problem is the text "garbage" as bytes
// that do not decode.
type rogueCodec struct{ encoding.Codec }

func (c rogueCodec) Marshal(v any) ([]byte, error) {
	if w, ok := v.(*pluginv1.WatchResponse); ok && len(w.GetProblems()) == 1 && w.GetProblems()[0].GetId() == "garbage" {
		return []byte{0xff, 0xff, 0xff, 0xff, 1, 2, 3}, nil
	}
	if m, ok := v.(proto.Message); ok {
		return proto.Marshal(m)
	}
	return nil, fmt.Errorf("not a message: %T", v)
}

func (c rogueCodec) Unmarshal(b []byte, v any) error { return proto.Unmarshal(b, v.(proto.Message)) }
func (c rogueCodec) Name() string                    { return "proto" }

func (r *rogue) Describe(ctx context.Context, _ *pluginv1.DescribeRequest) (*pluginv1.DescribeResponse, error) {
	d := &pluginv1.DescribeResponse{Name: "rogue", ConfigSchema: []byte("{}"), Collections: []string{collection.ServiceEntry}}
	switch r.role {
	case "hang-describe":
		<-ctx.Done()
	case "describe-fails":
		return nil, errors.New("no idea who I am")
	case "bad-name":
		d.Name = "../../etc"
	case "bad-schema":
		d.ConfigSchema = []byte("{")
	case "bad-collection":
		d.Collections = []string{"core/Secret"}
	}
	return d, nil
}

func (r *rogue) Configure(ctx context.Context, _ *pluginv1.ConfigureRequest) (*pluginv1.ConfigureResponse, error) {
	switch r.role {
	case "hang-configure":
		<-ctx.Done()
	case "configure-fails":
		return nil, errors.New("no room for it")
	}
	return &pluginv1.ConfigureResponse{}, nil
}

func (r *rogue) Watch(_ *pluginv1.WatchRequest, s grpc.ServerStreamingServer[pluginv1.WatchResponse]) error {
	switch r.role {
	case "hang-watch":
		<-s.Context().Done()
	case "garbage":
		return s.Send(&pluginv1.WatchResponse{Problems: []*pluginv1.Problem{{Id: "garbage"}}})
	case "huge":
		return s.Send(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{{Resource: make([]byte, wire.MaxMessage)}}})
	case "ends":
		return nil
	case "synced-twice":
		if err := s.Send(&pluginv1.WatchResponse{Synced: true}); err != nil {
			return err
		}
		if err := s.Send(&pluginv1.WatchResponse{Synced: true}); err != nil {
			return err
		}
	case "flood":
		batch := &pluginv1.WatchResponse{}
		for range 1000 {
			batch.Upserts = append(batch.Upserts, &pluginv1.Upsert{Resource: make([]byte, floodMessage/1000)})
		}
		count, err := os.Create(os.Getenv(floodKey))
		if err != nil {
			return err
		}
		defer count.Close()
		for sent := uint64(1); ; sent++ {
			if err := s.Send(batch); err != nil {
				return err
			}
			if _, err := count.WriteAt(binary.BigEndian.AppendUint64(nil, sent), 0); err != nil {
				return err
			}
		}
	case "odd-times":
		for _, at := range []*timestamppb.Timestamp{{Seconds: 1 << 62}, {Seconds: -5}, {Nanos: -1}, {}} {
			if err := s.Send(&pluginv1.WatchResponse{LastHeard: at}); err != nil {
				return err
			}
		}
		if err := s.Send(&pluginv1.WatchResponse{Synced: true}); err != nil {
			return err
		}
	case "stubborn", "chatty":
		if err := s.Send(&pluginv1.WatchResponse{Synced: true}); err != nil {
			return err
		}
	}
	<-s.Context().Done()
	return nil
}

// hostMain is a bridge that is there to be killed: it runs the plugin named in
// its arguments and prints the plugin's process id.
func hostMain() {
	host, err := supervisor.NewHost(os.Args[1], slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	sink := newSink()
	s, err := supervisor.New(host, spec("remote", remoteConfig{Socket: os.Args[2]}), sink, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		panic(err)
	}
	go func() { _ = s.Run(context.Background()) }()
	<-sink.begun
	fmt.Println(s.Status().PID)
	_, _ = io.Copy(io.Discard, os.Stdin)
	time.Sleep(time.Minute) // killed before
}
