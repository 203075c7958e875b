package supervisor

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	goplugin "github.com/hashicorp/go-plugin"
	"github.com/hashicorp/go-plugin/runner"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// limits is how long things may take.
type limits struct {
	// start: a process, to print its handshake.
	start time.Duration
	// answer: Describe and Configure, each.
	answer time.Duration
	// end: a process, to end after SIGTERM. The SDK gives an adapter 5 seconds.
	end time.Duration
	// silence: a stream, between two messages.
	silence time.Duration
	// minBackoff and maxBackoff bound the pause before a process is started again, refused is the one after a configuration
	// was refused.
	minBackoff, maxBackoff, refused time.Duration
	// healthy is how long a plugin must have been live for the back-off to begin anew.
	healthy time.Duration
}

var defaultLimits = limits{
	start:      10 * time.Second,
	answer:     10 * time.Second,
	end:        6 * time.Second,
	silence:    wire.HungAfter,
	minBackoff: 200 * time.Millisecond,
	maxBackoff: 30 * time.Second,
	refused:    time.Minute,
	healthy:    time.Minute,
}

// exitWithin is how long the end of a process may take to be seen after the end of its connection.
const exitWithin = time.Second

// Description is who a plugin says it is.
type Description struct {
	// Name is the adapter's name.
	Name string `json:"name"`
	// Version is the adapter's own version, for people.
	Version string `json:"version,omitempty"`
	// ConfigSchema and TranslateSchema are the JSON Schemas of the two blocks of a registry's configuration. TranslateSchema is nil
	// if the adapter takes none.
	ConfigSchema    json.RawMessage `json:"config_schema,omitempty"`
	TranslateSchema json.RawMessage `json:"translate_schema,omitempty"`
	// Collections are those that the plugin may publish.
	Collections []string `json:"collections"`
}

// client is a connection to one plugin process.
type client struct {
	limits  limits
	process *process // nil if the process could not be made
	plugin  *goplugin.Client
	api     pluginv1.AdapterServiceClient

	mu    sync.Mutex
	dir   string                        // of the socket; guarded by mu
	conns map[*grpc.ClientConn]struct{} // that go-plugin opened; guarded by mu
}

// open starts a plugin and connects to it. The client must be closed, whether there is an error or not. The function started, which may be
// nil, is told the process id as soon as there is one.
func open(ctx context.Context, h *Host, spec Spec, log *slog.Logger, started func(pid int)) (*client, error) {
	c := &client{limits: h.limits, conns: make(map[*grpc.ClientConn]struct{})}
	if err := spec.Validate(); err != nil {
		return c, err
	}
	if err := verify(spec); err != nil {
		return c, err
	}
	cmd := exec.Command(spec.Command[0], spec.Command[1:]...) //nolint:gosec,noctx // the operator configures it; its end is ours to manage
	if cmd.Err != nil {
		return c, cmd.Err
	}
	c.process = newProcess(h, cmd, log)
	c.process.started = started
	c.plugin = goplugin.NewClient(&goplugin.ClientConfig{
		HandshakeConfig:  wire.Handshake,
		VersionedPlugins: wire.Plugins(nil),
		AllowedProtocols: []goplugin.Protocol{goplugin.ProtocolGRPC},
		AutoMTLS:         true,
		StartTimeout:     h.limits.start,
		UnixSocketConfig: &goplugin.UnixSocketConfig{TempDir: h.dir},
		// What go-plugin has to say comes back as errors, and the plugin's own log lines do not go through it.
		Logger:     hclog.NewNullLogger(),
		SyncStdout: &lines{logs: c.process.logs, stream: "stdout"},
		SyncStderr: &lines{logs: c.process.logs, stream: "stderr"},
		RunnerFunc: func(_ hclog.Logger, template *exec.Cmd, dir string) (runner.Runner, error) {
			c.mu.Lock()
			c.dir = dir
			c.mu.Unlock()
			cmd.Env = append(template.Env, spec.Env...)
			cmd.Env = append(cmd.Env, wire.LogLevelKey+"="+logLevel(ctx, log))
			return c.process, nil
		},
		GRPCDialOptions: []grpc.DialOption{
			grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(wire.MaxMessage)),
			// go-plugin loses a connection if the process dies while it is opened.
			grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
				streamer grpc.Streamer, opts ...grpc.CallOption,
			) (grpc.ClientStream, error) {
				c.mu.Lock()
				c.conns[cc] = struct{}{}
				c.mu.Unlock()
				return streamer(ctx, desc, cc, method, opts...)
			}),
		},
	})

	// go-plugin's start takes no context.
	stop := context.AfterFunc(ctx, func() { _ = c.process.Kill(ctx) })
	defer stop()
	if _, err := c.plugin.Start(); err != nil {
		if err.Error() == startTimeout && ctx.Err() == nil {
			return c, fmt.Errorf("start %s: %w", spec.Command[0], c.noHandshake())
		}
		return c, fmt.Errorf("start %s: %w", spec.Command[0], c.explain(ctx, oneLine(err)))
	}
	proto, err := c.plugin.Client()
	if err != nil {
		return c, c.explain(ctx, fmt.Errorf("connect to %s: %w", spec.Command[0], err))
	}
	api, err := proto.Dispense(wire.PluginName)
	if err != nil {
		return c, c.explain(ctx, fmt.Errorf("connect to %s: %w", spec.Command[0], err))
	}
	c.api = api.(pluginv1.AdapterServiceClient) //nolint:forcetypeassert // wire.Adapter returns nothing else
	return c, nil
}

// startTimeout is what go-plugin says when [limits.start] is over.
const startTimeout = "timeout while waiting for plugin to start"

// noHandshake says that a process printed nothing on its standard output, and the last that it said elsewhere.
func (c *client) noHandshake() error {
	words := ""
	if last := c.process.logs.last(); last != "" {
		words = "; its last words: " + last
	}
	return fmt.Errorf("%w: no handshake on its standard output within %v%s; is this an adapter, and built for this machine?", ErrHung, c.limits.start, words)
}

// close ends the process and waits for everything that belongs to it. It may be called again.
func (c *client) close() {
	if c.process == nil {
		return
	}
	c.process.end(c.limits.end)
	c.plugin.Kill()
	c.process.wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for cc := range c.conns {
		_ = cc.Close() // most are closed already
	}
	if c.dir != "" {
		_ = os.RemoveAll(c.dir) // go-plugin leaves it if the process could not be started
	}
}

// pid returns the process id, 0 if there is no process.
func (c *client) pid() int {
	if c.process == nil || c.process.pid.Load() == 0 {
		return 0
	}
	return int(c.process.pid.Load())
}

// describe asks the plugin who it is and checks the answer.
func (c *client) describe(ctx context.Context, spec Spec) (Description, error) {
	call, cancel := context.WithTimeout(ctx, c.limits.answer)
	defer cancel()
	resp, err := c.api.Describe(call, &pluginv1.DescribeRequest{})
	if err != nil {
		return Description{}, c.explain(ctx, fmt.Errorf("describe: %w", plain(err, c.limits.answer)))
	}
	d := Description{
		Name:            resp.GetName(),
		Version:         resp.GetVersion(),
		ConfigSchema:    resp.GetConfigSchema(),
		TranslateSchema: resp.GetTranslateSchema(),
		Collections:     resp.GetCollections(),
	}
	if !adapterName.MatchString(d.Name) {
		return d, fmt.Errorf("%w: describe: its name %q must be lower-case letters, digits and dashes", ErrContract, d.Name)
	}
	if spec.Adapter != "" && d.Name != spec.Adapter {
		return d, fmt.Errorf("%w: describe: it calls itself %q, and %q is configured", ErrContract, d.Name, spec.Adapter)
	}
	if !json.Valid(d.ConfigSchema) {
		return d, fmt.Errorf("%w: describe: config_schema is not JSON", ErrContract)
	}
	if len(d.TranslateSchema) > 0 && !json.Valid(d.TranslateSchema) {
		return d, fmt.Errorf("%w: describe: translate_schema is not JSON", ErrContract)
	}
	if len(d.Collections) == 0 {
		return d, fmt.Errorf("%w: describe: it names no collection", ErrContract)
	}
	for _, name := range d.Collections {
		if !slices.Contains(collection.All(), name) {
			return d, fmt.Errorf("%w: describe: no collection that can be served is called %q", ErrContract, name)
		}
	}
	return d, nil
}

// configure gives the plugin its configuration. The error is a *ConfigError if the plugin refuses it.
func (c *client) configure(ctx context.Context, spec Spec) error {
	call, cancel := context.WithTimeout(ctx, c.limits.answer)
	defer cancel()
	resp, err := c.api.Configure(call, &pluginv1.ConfigureRequest{
		Registry:  spec.Registry,
		Config:    orEmpty(spec.Config),
		Translate: orEmpty(spec.Translate),
	})
	if err != nil {
		return c.explain(ctx, fmt.Errorf("configure: %w", plain(err, c.limits.answer)))
	}
	if len(resp.GetViolations()) == 0 {
		return nil
	}
	e := &ConfigError{}
	for _, v := range resp.GetViolations() {
		e.Violations = append(e.Violations, Violation{Field: v.GetField(), Reason: v.GetReason()})
	}
	return e
}

func orEmpty(b json.RawMessage) []byte {
	if len(b) == 0 {
		return []byte("{}")
	}
	return b
}

// explain adds to an error that may come from the end of the process how that ended.
func (c *client) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil || c.process.pid.Load() == 0 {
		return err
	}
	timer := time.NewTimer(exitWithin)
	defer timer.Stop()
	select {
	case <-c.process.exited:
		c.process.wait() // for its last words
		return fmt.Errorf("%w (%w)", c.process.exitError(), err)
	case <-timer.C:
	case <-ctx.Done():
	}
	return err
}

// oneLine returns err, or if its text has several lines an error with the same text on one.
func oneLine(err error) error {
	if text := err.Error(); strings.Contains(text, "\n") {
		return errors.New(strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' }), "; "))
	}
	return err
}

// plain takes the gRPC status off an error and keeps what a person can use.
func plain(err error, within time.Duration) error {
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	switch st.Code() {
	case codes.DeadlineExceeded:
		return fmt.Errorf("%w: no answer within %v", ErrHung, within)
	case codes.Unimplemented:
		return fmt.Errorf("%w: %s", ErrContract, st.Message())
	}
	return errors.New(st.Message())
}

// verify checks the executable's checksum.
func verify(spec Spec) error {
	sum, err := spec.checksum()
	if err != nil || sum == nil {
		return err
	}
	path, err := exec.LookPath(spec.Command[0])
	if err != nil {
		return err
	}
	ok, err := (&goplugin.SecureConfig{Checksum: sum, Hash: sha256.New()}).Check(path)
	if err != nil {
		return fmt.Errorf("checksum of %s: %w", path, err)
	}
	if !ok {
		return fmt.Errorf("%s: %w; if the file was changed on purpose, change sha256 too", path, ErrChecksum)
	}
	return nil
}

// lines is an io.Writer that logs what go-plugin forwards of the plugin's own output.
type lines struct {
	logs   *logPump
	stream string
	rest   []byte
}

// Write implements io.Writer.
func (l *lines) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		i := slices.Index(l.rest, '\n')
		if i < 0 && len(l.rest) < maxLine {
			return len(b), nil
		}
		if i < 0 {
			i = len(l.rest) - 1
		}
		l.logs.line(string(l.rest[:i]), l.stream)
		l.rest = l.rest[i+1:]
	}
}

var _ io.Writer = (*lines)(nil)

// logLevel returns the lowest level that is logged, as [wire.LogLevelKey] tells it.
func logLevel(ctx context.Context, log *slog.Logger) string {
	for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn} {
		if log.Enabled(ctx, l) {
			return l.String()
		}
	}
	return slog.LevelError.String()
}

// Describe starts a plugin, asks it who it is, and ends it.
func Describe(ctx context.Context, h *Host, spec Spec, log *slog.Logger) (Description, error) {
	c, err := open(ctx, h, spec, log, nil)
	defer c.close()
	if err != nil {
		return Description{}, err
	}
	return c.describe(ctx, spec)
}

// Check starts a plugin, gives it its configuration, and ends it. It returns what the plugin finds wrong with the configuration; the error is
// about anything else.
func Check(ctx context.Context, h *Host, spec Spec, log *slog.Logger) ([]Violation, error) {
	c, err := open(ctx, h, spec, log, nil)
	defer c.close()
	if err != nil {
		return nil, err
	}
	if _, err := c.describe(ctx, spec); err != nil {
		return nil, err
	}
	err = c.configure(ctx, spec)
	if e, ok := errors.AsType[*ConfigError](err); ok {
		return e.Violations, nil
	}
	return nil, err
}
