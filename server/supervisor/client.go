package supervisor

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// limits are the time limits of a supervisor.
type limits struct {
	// start bounds the time from process start to handshake.
	start time.Duration
	// answer bounds each of Describe and Configure.
	answer time.Duration
	// end bounds the exit after SIGTERM. The SDK gives an adapter 5 seconds.
	end time.Duration
	// silence bounds the time between two messages of a stream.
	silence time.Duration
	// minBackoff and maxBackoff bound the pause before a restart; refused is
	// the pause after a refused configuration.
	minBackoff, maxBackoff, refused time.Duration
	// healthy is how long a plugin must be live to reset the back-off.
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

// exitWithin bounds the time between the end of a connection and that of its
// process.
const exitWithin = time.Second

// Description identifies a plugin.
type Description struct {
	// Name is the adapter's name.
	Name string `json:"name"`
	// Version is the adapter's version, for display.
	Version string `json:"version,omitempty"`
	// Summary describes in one sentence what the adapter follows, for display.
	Summary string `json:"summary,omitempty"`
	// ConfigSchema and TranslateSchema are the JSON Schemas of the two blocks
	// of a registry's configuration. TranslateSchema is nil if the adapter has
	// no such block.
	ConfigSchema    json.RawMessage `json:"config_schema,omitempty"`
	TranslateSchema json.RawMessage `json:"translate_schema,omitempty"`
	// Collections are those the plugin may publish.
	Collections []string `json:"collections"`
}

// client is a connection to one plugin process.
type client struct {
	limits  limits
	process *process // nil if the process could not be created, and with Spec.Open
	dir     string   // of the socket
	conn    *grpc.ClientConn
	api     pluginv1.AdapterServiceClient
	output  sync.WaitGroup // runs forwardOutput

	confinement []string // as the plugin said; set by configure
	warnings    []Violation
}

// open starts a plugin and connects to it. The caller must close the client
// even after an error, which names the failed step. started, which may be nil,
// receives the process id. dropped, which may be nil, counts output lines that
// are not logged.
func open(ctx context.Context, h *Host, spec Spec, log *slog.Logger, started func(pid int), dropped prometheus.Counter) (*client, error) {
	c := &client{limits: h.limits}
	if err := spec.Validate(); err != nil {
		return c, err
	}
	if spec.Open != nil {
		var err error
		c.api, err = spec.Open(ctx)
		return c, err
	}
	cred, err := credential(spec.User)
	if err != nil {
		return c, err
	}
	name := spec.Command[0]
	cmd := exec.Command(name, spec.Command[1:]...) //nolint:gosec,noctx // the operator configures it; its end is ours to manage
	if cmd.Err != nil {
		return c, cmd.Err
	}
	pinned, err := pin(spec, cmd, h.dir)
	if err != nil {
		return c, err
	}
	if pinned != nil {
		defer pinned.Close() // the process has its own descriptor
	}
	cert, certPEM, err := wire.NewCertificate()
	if err != nil {
		return c, fmt.Errorf("start %s: make a certificate: %w", name, err)
	}
	if c.dir, err = os.MkdirTemp(h.dir, "plugin"); err != nil {
		return c, fmt.Errorf("start %s: make a directory for its socket: %w", name, err)
	}
	cmd.Env = slices.Concat(cmd.Env, environ(spec.EnvNames), memoryEnv(spec.Memory), wire.Environ(c.dir, certPEM), spec.Env, []string{wire.LogLevelKey + "=" + logLevel(ctx, log)})
	c.process = newProcess(h, cmd, log)
	c.process.memory, c.process.files, c.process.user = spec.Memory, spec.OpenFiles, cred
	c.process.logs.counter = dropped
	if err := errors.Join(c.give(cred), c.process.start()); err != nil {
		return c, fmt.Errorf("start %s: %w", name, err)
	}
	if started != nil {
		started(c.process.pid)
	}
	endpoint, err := c.handshake(ctx)
	if err != nil {
		return c, fmt.Errorf("start %s: %w", name, err)
	}
	if err := c.connect(ctx, endpoint, cert); err != nil {
		return c, fmt.Errorf("connect to %s: %w", name, err)
	}
	return c, nil
}

// handshake waits for the endpoint that the plugin prints.
func (c *client) handshake(ctx context.Context) (wire.Endpoint, error) {
	timer := time.NewTimer(c.limits.start)
	defer timer.Stop()
	select {
	case line, ok := <-c.process.handshake:
		if !ok {
			return wire.Endpoint{}, c.explain(ctx, errNoHandshake)
		}
		endpoint, err := wire.ParseHandshake(line)
		if errors.Is(err, wire.ErrVersion) {
			err = fmt.Errorf("%w: %w", ErrContract, err)
		}
		if err != nil {
			err = c.explain(ctx, err)
		}
		return endpoint, err
	case <-timer.C:
		return wire.Endpoint{}, fmt.Errorf("%w: no handshake on its standard output within %v%s; is this an adapter, and built for this machine?", ErrHung, c.limits.start, c.lastWords())
	case <-ctx.Done():
		c.process.signalGroup(syscall.SIGKILL)
		return wire.Endpoint{}, ctx.Err()
	}
}

// lastWords returns the last output of a running process, as an error suffix.
func (c *client) lastWords() string {
	if last := c.process.logs.last(); last != "" {
		return "; its last words: " + last
	}
	return ""
}

var errNoHandshake = errors.New("it closed its standard output before its handshake")

func (c *client) connect(ctx context.Context, endpoint wire.Endpoint, cert tls.Certificate) error {
	call, cancel := context.WithTimeout(ctx, c.limits.answer)
	defer cancel()
	conn, err := endpoint.Dial(call, cert)
	switch {
	case ctx.Err() != nil:
		c.process.signalGroup(syscall.SIGKILL)
		return ctx.Err()
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%w: no TLS or no HTTP/2 on its socket within %v%s", ErrHung, c.limits.answer, c.lastWords())
	case err != nil:
		if why := c.explain(ctx, err); errors.Is(why, ErrExited) {
			return why
		}
		return fmt.Errorf("%w%s", err, c.lastWords())
	}
	c.conn, c.api = conn, pluginv1.NewAdapterServiceClient(conn)
	// Ends with the connection; close waits for it.
	c.output.Go(c.forwardOutput)
	return nil
}

// forwardOutput logs the plugin's output from go-plugin's stdio service until
// the connection ends. A plugin that serves with go-plugin but without the SDK
// blocks if the output is not read; other plugins may lack the service.
func (c *client) forwardOutput() {
	// The stream ends with the connection.
	stream, err := c.conn.NewStream(context.Background(), &grpc.StreamDesc{ServerStreams: true}, "/plugin.GRPCStdio/StreamStdio")
	if err != nil || stream.SendMsg(&emptypb.Empty{}) != nil || stream.CloseSend() != nil {
		return
	}
	streams := map[uint64]*lineWriter{1: c.process.logs.stream("stdout"), 2: c.process.logs.stream("stderr")}
	// go-plugin does not export the messages. Field 1 is the output stream,
	// field 2 the output.
	for m := (&emptypb.Empty{}); stream.RecvMsg(m) == nil; {
		var which uint64
		var data []byte
		for b := m.ProtoReflect().GetUnknown(); len(b) > 0; {
			field, kind, n := protowire.ConsumeTag(b)
			switch {
			case field == 1 && kind == protowire.VarintType:
				which, _ = protowire.ConsumeVarint(b[n:])
			case field == 2 && kind == protowire.BytesType:
				data, _ = protowire.ConsumeBytes(b[n:])
			}
			b = b[n+protowire.ConsumeFieldValue(field, kind, b[n:]):] // cannot fail: the message was decoded before
		}
		if to := streams[which]; to != nil {
			_, _ = to.Write(data)
		}
	}
}

// close ends the process and waits for all its goroutines. It may be called
// more than once.
func (c *client) close() {
	if c.process == nil {
		return
	}
	c.process.end(c.limits.end)
	if c.conn != nil {
		_ = c.conn.Close()
	}
	c.output.Wait()
	c.process.wait()
	_ = os.RemoveAll(c.dir)
}

// describe requests and checks the plugin's Description.
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
		Summary:         resp.GetSummary(),
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

// configure sends the configuration. The error is a *ConfigError if the plugin
// refuses it.
func (c *client) configure(ctx context.Context, spec Spec) error {
	call, cancel := context.WithTimeout(ctx, c.limits.answer)
	defer cancel()
	req := &pluginv1.ConfigureRequest{
		Registry:   spec.Registry,
		Config:     orEmpty(spec.Config),
		Translate:  orEmpty(spec.Translate),
		Limits:     &pluginv1.Limits{Resources: uint64(max(0, spec.Resources)), Services: uint64(max(0, spec.Services)), Bytes: uint64(max(0, spec.Bytes))},
		Unconfined: spec.Unconfined, ConfinementRequired: spec.Confinement == ConfinementRequired,
		Labels: spec.Labels,
	}
	if s := spec.Shards; !s.All() {
		req.Shards = &pluginv1.Shards{First: uint32(s.First), Last: uint32(s.Last), Of: uint32(s.Of)}
	}
	resp, err := c.api.Configure(call, req)
	if err != nil {
		return c.explain(ctx, fmt.Errorf("configure: %w", plain(err, c.limits.answer)))
	}
	if len(resp.GetViolations()) == 0 {
		c.confinement = resp.GetConfinement()
		c.warnings = violationsOf(resp.GetWarnings())
		return c.confined(spec)
	}
	return &ConfigError{violationsOf(resp.GetViolations())}
}

func violationsOf(list []*pluginv1.Violation) (out []Violation) {
	for _, v := range list {
		out = append(out, Violation{Field: v.GetField(), Reason: v.GetReason()})
	}
	return out
}

func orEmpty(b json.RawMessage) []byte {
	if len(b) == 0 {
		return []byte("{}")
	}
	return b
}

// explain adds the exit status to an error that the end of the process may have
// caused.
func (c *client) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil || c.process == nil {
		return err
	}
	timer := time.NewTimer(exitWithin)
	defer timer.Stop()
	select {
	case <-c.process.exited:
		c.process.wait() // completes its output
		return fmt.Errorf("%w (%w)", c.process.exitError(), err)
	case <-timer.C:
	case <-ctx.Done():
	}
	return err
}

// plain converts a gRPC error to one for display, without the status.
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

// logLevel returns the lowest level logged, as a value of [wire.LogLevelKey].
func logLevel(ctx context.Context, log *slog.Logger) string {
	for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn} {
		if log.Enabled(ctx, l) {
			return l.String()
		}
	}
	return slog.LevelError.String()
}

// Describe starts a plugin, requests its Description, and ends it.
func Describe(ctx context.Context, h *Host, spec Spec, log *slog.Logger) (Description, error) {
	c, err := open(ctx, h, spec, log, nil, nil)
	defer c.close()
	if err != nil {
		return Description{}, err
	}
	return c.describe(ctx, spec)
}

// Check starts a plugin, sends its configuration, and ends it. Violations are
// those the plugin reports, warnings what it accepts; the error covers
// everything else.
func Check(ctx context.Context, h *Host, spec Spec, log *slog.Logger) (violations, warnings []Violation, err error) {
	c, err := open(ctx, h, spec, log, nil, nil)
	defer c.close()
	if err != nil {
		return nil, nil, err
	}
	if _, err := c.describe(ctx, spec); err != nil {
		return nil, nil, err
	}
	err = c.configure(ctx, spec)
	if e, ok := errors.AsType[*ConfigError](err); ok {
		return e.Violations, nil, nil
	}
	return nil, c.warnings, err
}
