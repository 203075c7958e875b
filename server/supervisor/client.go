package supervisor

import (
	"context"
	"crypto/sha256"
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

	goplugin "github.com/hashicorp/go-plugin"
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
	dir     string   // of the socket
	conn    *grpc.ClientConn
	api     pluginv1.AdapterServiceClient
	output  sync.WaitGroup // what forwardOutput runs
}

// open starts a plugin and connects to it. The client must be closed, whether there is an error or not. The function started, which may be
// nil, is told the process id as soon as there is one. The counter, which may be
// nil, counts lines of output that are not logged. The error says which step failed.
func open(ctx context.Context, h *Host, spec Spec, log *slog.Logger, started func(pid int), dropped prometheus.Counter) (*client, error) {
	c := &client{limits: h.limits}
	if err := spec.Validate(); err != nil {
		return c, err
	}
	if err := verify(spec); err != nil {
		return c, err
	}
	name := spec.Command[0]
	cmd := exec.Command(name, spec.Command[1:]...) //nolint:gosec,noctx // the operator configures it; its end is ours to manage
	if cmd.Err != nil {
		return c, cmd.Err
	}
	cert, certPEM, err := wire.NewCertificate()
	if err != nil {
		return c, fmt.Errorf("start %s: make a certificate: %w", name, err)
	}
	if c.dir, err = os.MkdirTemp(h.dir, "plugin"); err != nil {
		return c, fmt.Errorf("start %s: make a directory for its socket: %w", name, err)
	}
	cmd.Env = slices.Concat(os.Environ(), wire.Environ(c.dir, certPEM), spec.Env, []string{wire.LogLevelKey + "=" + logLevel(ctx, log)})
	c.process = newProcess(h, cmd, log)
	c.process.logs.counter = dropped
	if err := c.process.start(); err != nil {
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

// handshake waits for the plugin to say where it serves.
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

// lastWords is what a process that still runs said last, for the end of an error.
func (c *client) lastWords() string {
	if last := c.process.logs.last(); last != "" {
		return "; its last words: " + last
	}
	return ""
}

var errNoHandshake = errors.New("it closed its standard output before its handshake")

// connect opens the connection to the plugin.
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

// forwardOutput logs what the plugin prints through go-plugin's service for
// that, until the connection ends. A plugin that serves with go-plugin, but
// without the SDK, blocks if nobody reads it; others need not have the service.
func (c *client) forwardOutput() {
	// The connection's end is that of the stream.
	stream, err := c.conn.NewStream(context.Background(), &grpc.StreamDesc{ServerStreams: true}, "/plugin.GRPCStdio/StreamStdio")
	if err != nil || stream.SendMsg(&emptypb.Empty{}) != nil || stream.CloseSend() != nil {
		return
	}
	streams := map[uint64]*lineWriter{1: c.process.logs.stream("stdout"), 2: c.process.logs.stream("stderr")}
	// The messages are decoded by hand, for go-plugin does not export them:
	// field 1 says which of the streams it is, field 2 is what was printed.
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
			b = b[n+protowire.ConsumeFieldValue(field, kind, b[n:]):] // it was decoded once, so it is whole
		}
		if to := streams[which]; to != nil {
			_, _ = to.Write(data)
		}
	}
}

// close ends the process and waits for everything that belongs to it. It may be called again.
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
		Limits:    &pluginv1.Limits{Resources: uint64(max(0, spec.Resources)), Bytes: uint64(max(0, spec.Bytes))},
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
	if ctx.Err() != nil {
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
	c, err := open(ctx, h, spec, log, nil, nil)
	defer c.close()
	if err != nil {
		return Description{}, err
	}
	return c.describe(ctx, spec)
}

// Check starts a plugin, gives it its configuration, and ends it. It returns what the plugin finds wrong with the configuration; the error is
// about anything else.
func Check(ctx context.Context, h *Host, spec Spec, log *slog.Logger) ([]Violation, error) {
	c, err := open(ctx, h, spec, log, nil, nil)
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
