package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

const (
	// connectWithin is how long a plugin waits for the connection of its host
	// before it exits.
	connectWithin = 30 * time.Second
	// stopWithin is how long an adapter may take to return after its context
	// ended.
	stopWithin = 5 * time.Second
	// tellWithin is how long a plugin whose adapter failed waits until the host
	// has read the error.
	tellWithin = 5 * time.Second
	// maxStackBytes bounds a logged stack, so that the record fits into a line
	// of the bridge's log.
	maxStackBytes = 8 << 10
	// gcPercent is the default of GOGC. It is below Go's since most memory of a
	// plugin lives as long as the service it describes.
	gcPercent = 50
)

// Option configures [Main]. C is the type of the adapter's configuration.
type Option[C any] interface {
	set(o *options)
}

type options struct {
	defaults    any // a C
	translate   Translate
	version     string
	summary     string
	collections []string
	access      func(config any) Access // nil: the plugin keeps its rights
}

type defaultsOption[C any] struct{ c C }

func (d defaultsOption[C]) set(o *options) { o.defaults = d.c }

// AnyOption is an [Option] for every type of configuration.
type AnyOption func(o *options)

func (f AnyOption) set(o *options) { f(o) }

// WithDefaults sets the default configuration. The user's is decoded over a
// copy of it: objects are merged field by field, lists replaced.
func WithDefaults[C any](c C) Option[C] { return defaultsOption[C]{c} }

// WithTranslate sets the default translate block.
func WithTranslate(t Translate) AnyOption {
	return func(o *options) { o.translate = t }
}

// WithVersion sets the version of the adapter, for display.
func WithVersion(version string) AnyOption {
	return func(o *options) { o.version = version }
}

// WithSummary sets one sentence, for display, that begins with a verb and
// describes what the adapter follows: "Follows a Consul catalog."
func WithSummary(sentence string) AnyOption {
	return func(o *options) { o.summary = sentence }
}

// WithCollections sets the collections that the adapter may publish, as in
// package collection. The default is what services translate to: ServiceEntry,
// WorkloadEntry and DestinationRule.
func WithCollections(names ...string) AnyOption {
	return func(o *options) { o.collections = names }
}

// Main runs an adapter as a plugin and exits the process when the host requests
// it or disconnects. It does not return.
//
// The name of the adapter has lower-case letters, digits and dashes. C is the
// type of its configuration, a non-recursive struct with json tags; the tags
// jsonschema_description and jsonschema (github.com/invopop/jsonschema)
// describe its fields. A method Validate() error of C or *C may report further
// errors, as *[FieldError], several by errors.Join. It is called even after
// schema errors, so that all errors are reported at once; invalid values are
// then unset, and its errors about them are dropped. newAdapter must not start
// anything; its error is reported as an error of the configuration, of a field
// if it is a *FieldError.
//
// Exit codes: 0 if the host stopped the plugin or disconnected, 1 if the
// adapter failed, 2 if the process was not started by a host.
func Main[C any](name string, newAdapter func(C, Env) (Adapter, error), opts ...Option[C]) {
	o := options{collections: []string{collection.ServiceEntry, collection.WorkloadEntry, collection.DestinationRule}}
	for _, opt := range opts {
		opt.set(&o)
	}
	os.Exit(run(name, o, func() (*server, error) { return newServer(name, o, newAdapter) }))
}

func run(name string, o options, build func() (*server, error)) (code int) {
	stderr := os.Stderr
	if os.Getenv(wire.CookieKey) != wire.CookieValue {
		version := ""
		if o.version != "" {
			version = " " + o.version
		}
		fmt.Fprintf(stderr, `This is %s%s, an adapter of Isthmus. It is started by the bridge and does nothing on its own.

To use it, name it in the bridge's configuration and start the bridge:

    registries:
    - name: my-registry
      type: %s
      config: {}

    isthmus serve --config isthmus.yaml

An adapter that is not built in is an executable called isthmus-adapter-%s in the bridge's plugin_dir.
`, name, version, name, name)
		return 2
	}

	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	log := newLogger(stderr)
	takeStandardLog(log)
	if err := wire.NoCore(); err != nil {
		log.Warn("the process may leave a core file", "err", err)
	}
	srv, err := build()
	if err != nil {
		log.Error("the adapter cannot be used; its author has to correct it", "adapter", name, "err", err)
		return 1
	}
	srv.log, srv.alone = log, true
	// go-plugin replaces both for its own forwarding, which loses the last
	// output; the bridge reads the real stderr.
	srv.restore = func() { os.Stdout, os.Stderr = stderr, stderr }

	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()

	conns := &connections{gone: make(chan struct{}), first: make(chan struct{})}
	served := make(chan struct{})
	// Ends when the host shuts the plugin down, or with the process.
	go func() {
		defer close(served)
		goplugin.Serve(&goplugin.ServeConfig{
			HandshakeConfig:  wire.Handshake,
			VersionedPlugins: wire.Plugins(srv),
			Logger:           hclog.New(&hclog.LoggerOptions{Name: "go-plugin", Level: hclog.Warn, Output: stderr, JSONFormat: true}),
			GRPCServer: func(opts []grpc.ServerOption) *grpc.Server {
				return grpc.NewServer(append(opts, grpc.StatsHandler(conns), grpc.MaxRecvMsgSize(wire.MaxMessage))...)
			},
		})
	}()

	var adapter sync.WaitGroup
	// Ends with the adapter, which must return when ctx ends.
	adapter.Go(func() {
		select {
		case <-srv.watched:
			srv.end(runAdapter(ctx, srv))
		case <-ctx.Done():
		}
	})

	connect := time.NewTimer(connectWithin)
	defer connect.Stop()
	first := conns.first
wait:
	for {
		select {
		case <-first:
			first = nil
			connect.Stop()
		case <-connect.C:
			log.Error("the bridge did not connect", "within", connectWithin)
			code = 1
			break wait
		case <-ctx.Done(): // SIGTERM
			break wait
		case <-served:
			break wait
		case <-conns.gone:
			log.Debug("the bridge is gone")
			break wait
		case <-srv.ended:
			code = 1
			// The stream reports the error to the host, which then disconnects.
			tell := time.NewTimer(tellWithin)
			select {
			case <-conns.gone:
			case <-served:
			case <-ctx.Done():
			case <-tell.C:
			}
			tell.Stop()
			break wait
		}
	}

	cancel()
	done := make(chan struct{})
	// Ends with the adapter, or with the process.
	go func() {
		adapter.Wait()
		close(done)
	}()
	stop := time.NewTimer(stopWithin)
	defer stop.Stop()
	select {
	case <-done:
	case <-stop.C:
		log.Warn("the adapter did not end in time", "within", stopWithin)
	}
	return code
}

// errReturned is the failure of an adapter that returns nil before its context
// ends.
var errReturned = errors.New("the adapter returned without an error although it was not told to end")

// runAdapter runs the adapter until ctx ends. A panic becomes an error.
func runAdapter(ctx context.Context, srv *server) (err error) {
	defer func() {
		if p := recover(); p != nil {
			srv.log.Error("the adapter panicked", "panic", fmt.Sprint(p), "stack", stack())
			err = fmt.Errorf("the adapter panicked: %v", p)
		}
	}()
	inner, cancel := context.WithCancelCause(ctx)
	var follow sync.WaitGroup
	defer func() {
		cancel(nil)
		follow.Wait()
	}()
	if srv.confined != nil {
		// Ends with inner.
		follow.Go(func() { srv.confined.follow(inner, cancel) })
	}
	err = srv.adapter.Run(inner, srv.given)
	if cause := context.Cause(inner); errors.Is(cause, errMoved) && ctx.Err() == nil {
		err = cause
	}
	if err == nil && ctx.Err() == nil {
		err = errReturned
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, errMoved) {
		srv.log.Error("the adapter failed", "err", err)
	}
	return err
}

// stack returns the stack of the goroutine, clipped to maxStackBytes.
func stack() string { return clip.Text(string(debug.Stack()), maxStackBytes) }

// connections is a stats.Handler that detects the host's first connection and
// the end of its last.
type connections struct {
	first chan struct{} // closed at the first connection
	gone  chan struct{} // closed at the end of the last connection

	mu sync.Mutex
	// guarded by mu
	n         int
	hadFirst  bool
	hadLeaves bool
}

var _ stats.Handler = (*connections)(nil)

// TagRPC implements [stats.Handler].
func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements [stats.Handler].
func (*connections) HandleRPC(context.Context, stats.RPCStats) {}

// TagConn implements [stats.Handler].
func (*connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements [stats.Handler].
func (c *connections) HandleConn(_ context.Context, s stats.ConnStats) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s.(type) {
	case *stats.ConnBegin:
		c.n++
		if !c.hadFirst {
			c.hadFirst = true
			close(c.first)
		}
	case *stats.ConnEnd:
		c.n--
		if c.n == 0 && !c.hadLeaves {
			c.hadLeaves = true
			close(c.gone)
		}
	}
}
