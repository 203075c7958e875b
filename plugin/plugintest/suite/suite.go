package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	jsonschema "github.com/santhosh-tekuri/jsonschema/v6"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// Config configures the checks of one executable.
type Config struct {
	// Command is the executable and its arguments. In package plugintest empty
	// means the test binary, whose TestMain calls Self.
	Command []string
	// Env is added to the environment, as "KEY=VALUE".
	Env []string
	// Config is a valid config block with which the plugin can follow a
	// registry. Empty means {}.
	Config json.RawMessage
	// Translate is a translate block. Empty means {}.
	Translate json.RawMessage
	// Registry is the registry's name. Empty means "conformance".
	Registry string
	// Adapter is the expected name of the plugin. Empty means any.
	Adapter string
	// Within bounds the time of a first listing or a change. Zero means 30
	// seconds.
	Within time.Duration
	// Changing reports that the registry changes by itself, so two streams may
	// differ.
	Changing bool
	// Changes are made in order, on one stream.
	Changes []Change
	// Outages are made in order, on one stream.
	Outages []Outage
	// Flaps is how the registry comes and goes.
	Flaps *Flaps
}

// Change is a change of the registry and its expected effect on the stream.
type Change struct {
	// Name describes it in messages.
	Name string
	// Do makes the change.
	Do func(ctx context.Context) error
	// Want returns an error while the expected effect is missing. It is called
	// after every message.
	Want func(w *World) error
	// MaxUpserts bounds the upserts caused by the change. Zero means no bound.
	MaxUpserts int
}

// Check is one requirement of the contract. It starts processes of its own.
type Check struct {
	// Name is the requirement as a clause: "describe works before configure".
	Name string
	// Cure is what an author whose plugin fails the check does about it, a
	// sentence.
	Cure string

	run func(ctx context.Context, cfg Config) error
	// after are the names of checks on which it builds: a plugin that fails one
	// of them fails this one for the same cause.
	after []string
	// lacks returns what the configuration lacks for the check, or "".
	lacks func(cfg Config) string
}

// Run returns an error that says what is wrong. It is a *[RefusedError] if
// the plugin refuses the configuration that the check needs, [ErrNoProcess] if
// it cannot be started at all, and [ErrNoHandshake] if it cannot be connected
// to; other checks then fail alike.
func (c Check) Run(ctx context.Context, cfg Config) error { return c.run(ctx, cfg.withDefaults()) }

// Lacks returns what a configuration lacks for the check to show anything, or
// "".
func (c Check) Lacks(cfg Config) string {
	if c.lacks == nil {
		return ""
	}
	return c.lacks(cfg)
}

// Failed has the names of checks that failed, or build on one that did.
type Failed map[string]bool

// Before returns the check that failed before, for whose cause this one would
// fail too: it shows nothing of its own. It returns "" if there is none.
func (f Failed) Before(c Check) string {
	i := slices.IndexFunc(c.after, func(name string) bool { return f[name] })
	if i < 0 {
		return ""
	}
	f[c.Name] = true
	return c.after[i]
}

// Warning is what is no violation of the contract, and mostly not meant.
type Warning struct{ Text string }

// Error returns the text.
func (w *Warning) Error() string { return w.Text }

// Errors of every check alike.
var (
	// ErrNoProcess reports that the executable cannot be run.
	ErrNoProcess = errors.New("the executable cannot be run")
	// ErrNoHandshake reports that the plugin cannot be connected to.
	ErrNoHandshake = errors.New("there is no connection to the plugin")
)

// RefusedError reports that the plugin refuses Config.Config or
// Config.Translate.
type RefusedError struct {
	// Violations are the reasons by field: "config.address".
	Violations map[string]string
}

// Error lists the fields, sorted.
func (e *RefusedError) Error() string {
	all := make([]string, 0, len(e.Violations))
	for _, field := range slices.Sorted(maps.Keys(e.Violations)) {
		all = append(all, field+": "+e.Violations[field])
	}
	return "the configuration is refused: " + strings.Join(all, "; ")
}

// Checks on which others build.
const (
	shakes    = "it shakes hands with its host"
	describes = "describe works before configure"
	lists     = "everything is sent, then synced"
	again     = "a second watch begins again"
	lives     = "it gives a sign of life"
	leaves    = "it ends when the host goes"
)

var checks = []Check{
	{
		Name: "a person who starts it is told what it is", run: byHand,
		Cure: "Without " + wire.CookieKey + "=" + wire.CookieValue + " in the environment, print on standard error what the program is and exit with a code other than 0.",
	},
	{
		Name: shakes, run: shakeHands,
		Cure: "Write the handshake as the first line on standard output, flush it, and serve gRPC with TLS where it says.",
	},
	{
		Name: describes, run: describeFirst, after: []string{shakes},
		Cure: "Answer Describe at any time, always alike: a name in lower case, a JSON Schema of the config block, and the collections that are sent.",
	},
	{
		Name: "watch before configure is refused", run: watchFirst, after: []string{shakes},
		Cure: "Answer Watch with the status FAILED_PRECONDITION until Configure succeeded.",
	},
	{
		Name: "unknown field is refused with its path", run: unknownField, after: []string{describes},
		Cure: "Decode both blocks strictly, and answer Configure with a violation for each unknown field: \"config.NAME\" or \"translate.NAME\".",
	},
	{
		Name: "wrong types are refused with their path", run: wrongTypes, after: []string{describes},
		Cure: "Answer Configure with a violation that has the path of each field whose value does not fit the schema of Describe.",
	},
	{
		Name: "configuration is taken once", run: configureOnce, after: []string{describes},
		Cure: "Answer a second Configure with the status FAILED_PRECONDITION; the bridge starts another process for another configuration.",
	},
	{
		Name: lists, run: fullListing, after: []string{describes},
		Cure: "Send every resource, each as the contract describes it, and then synced, once for each Watch.",
	},
	{
		Name: again, run: secondWatch, after: []string{lists},
		Cure: "Begin each Watch with everything, and let create_time be constant for a resource.",
	},
	{
		Name: "another process sends the same", run: sameAgain, after: []string{lists, again},
		Cure: "Make the same bytes of the same registry: sort what a map holds, and take create_time from the registry or a constant, not from the clock.",
	},
	{
		Name: "changes arrive", run: changes, after: []string{lists},
		Cure: "Send a change of the registry as soon as it is known, and only what changed.",
		lacks: func(cfg Config) string {
			if len(cfg.Changes) == 0 {
				return "changes of the registry"
			}
			return ""
		},
	},
	{
		Name: "stale beats empty", run: outages, after: []string{lists},
		Cure: "While the registry cannot be followed, remove nothing and send a status with the reason; afterwards an empty one.",
		lacks: func(cfg Config) string {
			if len(cfg.Outages) == 0 {
				return "outages of the registry"
			}
			return ""
		},
	},
	{
		Name: "the registry flaps", run: flaps, after: []string{lists},
		Cure: "Count the time for which an instance is retained from the first complete answer that lacks it; an outage pauses it, and does not start it again. In Go, plugin.Grace does.",
		lacks: func(cfg Config) string {
			if cfg.Flaps == nil {
				return "a registry that comes and goes"
			}
			return ""
		},
	},
	{
		Name: lives, run: heartbeat, after: []string{describes},
		Cure: "Send an empty message when there was nothing to send for 2 seconds.",
	},
	{
		Name: leaves, run: hostGoes, after: []string{lives},
		Cure: "Exit when the connection of the bridge ends.",
	},
	{
		Name: "it ends at SIGTERM", run: sigterm, after: []string{lives},
		Cure: "Exit at SIGTERM; a shell script starts the program with exec, so that it receives the signal.",
	},
	{
		Name: "standard output is for the handshake only", run: stdout, after: []string{lists, leaves},
		Cure: "Write logs to standard error.",
	},
	{
		Name: "the bridge follows it", run: bridge, after: []string{lists},
		Cure: "The bridge's log says what it does not accept; what the other checks found comes first.",
	},
}

// Checks returns all checks, in the order in which they build on each other.
func Checks() []Check { return slices.Clone(checks) }

func (c Config) withDefaults() Config {
	if len(c.Config) == 0 {
		c.Config = json.RawMessage("{}")
	}
	if len(c.Translate) == 0 {
		c.Translate = json.RawMessage("{}")
	}
	if c.Registry == "" {
		c.Registry = "conformance"
	}
	if c.Within == 0 {
		c.Within = 30 * time.Second
	}
	return c
}

// with starts a plugin and runs f with it.
func with(ctx context.Context, cfg Config, f func(p *process) error) error {
	p, err := start(ctx, cfg)
	if err != nil {
		return err
	}
	return p.fail(f(p))
}

// answerWithin bounds the duration of Describe and Configure.
const answerWithin = 10 * time.Second

func describe(ctx context.Context, p *process) (*pluginv1.DescribeResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	d, err := p.api.Describe(ctx, &pluginv1.DescribeRequest{})
	if err != nil {
		return nil, fmt.Errorf("describe: %w", err)
	}
	return d, nil
}

// configure returns the violations by field.
func configure(ctx context.Context, p *process, cfg Config, config, translate []byte) (map[string]string, error) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	resp, err := p.api.Configure(ctx, &pluginv1.ConfigureRequest{Registry: cfg.Registry, Config: config, Translate: translate})
	if err != nil {
		return nil, fmt.Errorf("configure: %w", err)
	}
	out := make(map[string]string)
	for _, v := range resp.GetViolations() {
		if v.GetReason() == "" {
			return nil, fmt.Errorf("configure: violation of %q without a reason", v.GetField())
		}
		out[v.GetField()] = v.GetReason()
	}
	return out, nil
}

// configured runs f with a configured plugin.
func configured(ctx context.Context, cfg Config, f func(p *process, d *pluginv1.DescribeResponse) error) error {
	return with(ctx, cfg, func(p *process) error {
		d, err := describe(ctx, p)
		if err != nil {
			return err
		}
		v, err := configure(ctx, p, cfg, cfg.Config, cfg.Translate)
		if err != nil {
			return err
		}
		if len(v) > 0 {
			return &RefusedError{v}
		}
		return f(p, d)
	})
}

// byHand starts the plugin without a host.
func byHand(ctx context.Context, cfg Config) error {
	p, _, err := launch(cfg, nil)
	if err != nil {
		return err
	}
	if err := p.awaitEnd(ctx, "it was started without a host"); err != nil {
		return errors.Join(err, p.stop())
	}
	p.output.Wait()
	switch {
	case p.err == nil:
		err = errors.New("without a host it must end with an exit code other than 0")
	case p.errors() == "":
		err = errors.New("without a host it must say on standard error what it is")
	}
	return errors.Join(err, p.stop())
}

// shakeHands connects to the plugin.
func shakeHands(ctx context.Context, cfg Config) error {
	return with(ctx, cfg, func(*process) error { return nil })
}

var adapterName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

func describeFirst(ctx context.Context, cfg Config) error {
	return with(ctx, cfg, func(p *process) error {
		d, err := describe(ctx, p)
		if err != nil {
			return err
		}
		var all []error
		if !adapterName.MatchString(d.GetName()) {
			all = append(all, fmt.Errorf("describe: name %q: must be lower-case letters, digits and dashes", d.GetName()))
		}
		if cfg.Adapter != "" && d.GetName() != cfg.Adapter {
			all = append(all, fmt.Errorf("describe: name %q, want %q", d.GetName(), cfg.Adapter))
		}
		if err := checkSchema(d.GetConfigSchema()); err != nil {
			all = append(all, fmt.Errorf("describe: config_schema: %w", err))
		}
		if len(d.GetTranslateSchema()) > 0 {
			if err := checkSchema(d.GetTranslateSchema()); err != nil {
				all = append(all, fmt.Errorf("describe: translate_schema: %w", err))
			}
		}
		if len(d.GetCollections()) == 0 {
			all = append(all, errors.New("describe: it names no collection"))
		}
		for _, c := range d.GetCollections() {
			if !slices.Contains(collection.All(), c) {
				all = append(all, fmt.Errorf("describe: there is no collection %q", c))
			}
		}
		again, err := describe(ctx, p)
		if err != nil {
			all = append(all, err)
		} else if !proto.Equal(d, again) {
			all = append(all, errors.New("describe: the second answer differs from the first"))
		}
		return errors.Join(all...)
	})
}

func checkSchema(b []byte) error {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
	if err != nil {
		return err
	}
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource("schema.json", doc); err != nil {
		return err
	}
	_, err = c.Compile("schema.json")
	return err
}

func watchFirst(ctx context.Context, cfg Config) error {
	return with(ctx, cfg, func(p *process) error {
		call, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		s, err := p.api.Watch(call, &pluginv1.WatchRequest{})
		if err == nil {
			_, err = s.Recv()
		}
		if status.Code(err) != codes.FailedPrecondition {
			return fmt.Errorf("watch before configure: %w, must be FAILED_PRECONDITION", cmpError(err))
		}
		return nil
	})
}

// cmpError returns err, or an error that reports its absence.
func cmpError(err error) error {
	if err == nil {
		return errors.New("no error")
	}
	return err
}

// plus returns a JSON object with an added field.
func plus(object []byte, field string, value any) ([]byte, error) {
	m := map[string]any{}
	d := json.NewDecoder(bytes.NewReader(object))
	d.UseNumber()
	if err := d.Decode(&m); err != nil {
		return nil, err
	}
	m[field] = value
	return json.Marshal(m)
}

func unknownField(ctx context.Context, cfg Config) error {
	const field = "no_such_field_of_any_adapter"
	return with(ctx, cfg, func(p *process) error {
		d, err := describe(ctx, p)
		if err != nil {
			return err
		}
		var all []error
		config, err := plus(cfg.Config, field, 1)
		if err != nil {
			return err
		}
		v, err := configure(ctx, p, cfg, config, cfg.Translate)
		if err != nil {
			return err
		}
		if _, ok := v["config."+field]; !ok {
			all = append(all, fmt.Errorf("config with the unknown field %q: violations %v, want one of %q", field, v, "config."+field))
		}
		if len(d.GetTranslateSchema()) > 0 {
			translate, err := plus(cfg.Translate, field, 1)
			if err != nil {
				return err
			}
			// Violations leave the plugin unconfigured, so Configure may be
			// repeated.
			v, err := configure(ctx, p, cfg, cfg.Config, translate)
			if err != nil {
				return errors.Join(append(all, err)...)
			}
			if _, ok := v["translate."+field]; !ok {
				all = append(all, fmt.Errorf("translate with the unknown field %q: violations %v, want one of %q", field, v, "translate."+field))
			}
		}
		return errors.Join(all...)
	})
}

func wrongTypes(ctx context.Context, cfg Config) error {
	return with(ctx, cfg, func(p *process) error {
		d, err := describe(ctx, p)
		if err != nil {
			return err
		}
		var all []error
		for block, schema := range map[string][]byte{"config": d.GetConfigSchema(), "translate": d.GetTranslateSchema()} {
			var s struct {
				Properties map[string]struct {
					Type string `json:"type"`
				} `json:"properties"`
			}
			if len(schema) == 0 {
				continue
			}
			if err := json.Unmarshal(schema, &s); err != nil {
				return fmt.Errorf("describe: schema of %s: %w", block, err)
			}
			for _, name := range slices.Sorted(maps.Keys(s.Properties)) {
				var wrong any
				switch s.Properties[name].Type {
				case "":
					continue // of several types, or a reference
				case "object":
					wrong = "text"
				default:
					wrong = map[string]any{"wrong": true}
				}
				config, translate := cfg.Config, cfg.Translate
				target := &config
				if block == "translate" {
					target = &translate
				}
				b, err := plus(*target, name, wrong)
				if err != nil {
					return err
				}
				*target = b
				v, err := configure(ctx, p, cfg, config, translate)
				if err != nil {
					return errors.Join(append(all, err)...)
				}
				path := block + "." + name
				if !slices.ContainsFunc(slices.Collect(maps.Keys(v)), func(f string) bool {
					return f == path || strings.HasPrefix(f, path+".") || strings.HasPrefix(f, path+"[")
				}) {
					all = append(all, fmt.Errorf("%s of a wrong type: violations %v, want one of %q", name, v, path))
				}
			}
		}
		return errors.Join(all...)
	})
}

func configureOnce(ctx context.Context, cfg Config) error {
	return configured(ctx, cfg, func(p *process, _ *pluginv1.DescribeResponse) error {
		_, err := configure(ctx, p, cfg, cfg.Config, cfg.Translate)
		if status.Code(err) != codes.FailedPrecondition {
			return fmt.Errorf("second configure: %w, must be FAILED_PRECONDITION", cmpError(err))
		}
		return nil
	})
}

// stream is one Watch and the state received on it.
type stream struct {
	api    grpc.ServerStreamingClient[pluginv1.WatchResponse]
	world  *World
	cancel context.CancelFunc
}

func watch(ctx context.Context, p *process, d *pluginv1.DescribeResponse) (*stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	s, err := p.api.Watch(ctx, &pluginv1.WatchRequest{})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("watch: %w", err)
	}
	return &stream{s, newWorld(d.GetCollections()), cancel}, nil
}

// until receives messages until want returns nil.
func (s *stream) until(within time.Duration, what string, want func(w *World) error) error {
	timer := time.AfterFunc(within, s.cancel)
	defer timer.Stop()
	missing := want(s.world)
	for missing != nil {
		resp, err := s.api.Recv()
		if status.Code(err) == codes.Canceled {
			degraded := ""
			if s.world.Degraded != "" {
				degraded = "; the registry cannot be followed: " + s.world.Degraded
			}
			return fmt.Errorf("%s did not come within %v: %w%s", what, within, missing, degraded)
		}
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		if err := s.world.apply(resp); err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		missing = want(s.world)
	}
	return nil
}

var errNotSynced = errors.New("synced was not sent")

func synced(w *World) error {
	if !w.Synced {
		return errNotSynced
	}
	return nil
}

// listed calls do with a stream that has had the first full listing.
func listed(ctx context.Context, cfg Config, do func(p *process, s *stream) error) error {
	return configured(ctx, cfg, func(p *process, d *pluginv1.DescribeResponse) error {
		s, err := watch(ctx, p, d)
		if err != nil {
			return err
		}
		defer s.cancel()
		if err := s.until(cfg.Within, "the first full listing", synced); err != nil {
			return err
		}
		return do(p, s)
	})
}

func fullListing(ctx context.Context, cfg Config) error {
	return listed(ctx, cfg, func(_ *process, s *stream) error { return s.world.withoutEndpoints() })
}

// sameAgain compares what two processes send, byte by byte.
func sameAgain(ctx context.Context, cfg Config) error {
	if cfg.Changing {
		return nil
	}
	var worlds []*World
	for range 2 {
		if len(worlds) > 0 {
			// A clock that was made a time of whole seconds has moved on.
			timer := time.NewTimer(time.Second)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return ctx.Err()
			}
		}
		if err := listed(ctx, cfg, func(_ *process, s *stream) error {
			worlds = append(worlds, s.world)
			return nil
		}); err != nil {
			return err
		}
	}
	return worlds[0].differs(worlds[1])
}

func secondWatch(ctx context.Context, cfg Config) error {
	return configured(ctx, cfg, func(p *process, d *pluginv1.DescribeResponse) error {
		first, err := watch(ctx, p, d)
		if err != nil {
			return err
		}
		defer first.cancel()
		if err := first.until(cfg.Within, "the first full listing", synced); err != nil {
			return err
		}
		first.cancel()
		second, err := watch(ctx, p, d)
		if err != nil {
			return err
		}
		defer second.cancel()
		if err := second.until(cfg.Within, "the full listing of a second stream", synced); err != nil {
			return err
		}
		before, after := first.world.createTimes(), second.world.createTimes()
		for i, is := range after {
			if was, ok := before[i]; ok && was != is {
				return fmt.Errorf("create_time of %v was %s on the first stream and %s on the second; it must be constant", i, was, is)
			}
		}
		if !cfg.Changing && !slices.Equal(first.world.keys(), second.world.keys()) {
			return fmt.Errorf("the first stream listed %d resources, the second %d others or more or fewer: %d", len(before), len(after), len(after))
		}
		return nil
	})
}

func changes(ctx context.Context, cfg Config) error {
	if len(cfg.Changes) == 0 {
		return nil
	}
	return listed(ctx, cfg, func(p *process, s *stream) error {
		for _, c := range cfg.Changes {
			before := s.world.Upserts
			if err := c.Do(ctx); err != nil {
				return fmt.Errorf("change %q: %w", c.Name, err)
			}
			if err := s.until(cfg.Within, "change "+c.Name, c.Want); err != nil {
				return err
			}
			if n := s.world.Upserts - before; c.MaxUpserts > 0 && n > c.MaxUpserts {
				return fmt.Errorf("change %q cost %d upserts, want at most %d", c.Name, n, c.MaxUpserts)
			}
		}
		return nil
	})
}

func heartbeat(ctx context.Context, cfg Config) error {
	return configured(ctx, cfg, func(p *process, d *pluginv1.DescribeResponse) error {
		ctx, cancel := context.WithTimeout(ctx, 2*wire.HeartbeatLimit+cfg.Within)
		defer cancel()
		s, err := watch(ctx, p, d)
		if err != nil {
			return err
		}
		defer s.cancel()
		// Tolerance for stalls of the machine, added to the limits of the
		// contract.
		const grace = 2 * time.Second
		began, last := time.Now(), time.Now()
		for time.Since(began) < wire.HeartbeatLimit+wire.HeartbeatLimit/2 {
			silence := time.AfterFunc(wire.HeartbeatLimit+grace, s.cancel)
			_, err := s.api.Recv()
			silence.Stop()
			if err != nil {
				return fmt.Errorf("no message for %v (%w); there must be one, empty if need be, every %v",
					time.Since(last).Round(time.Millisecond), err, wire.HeartbeatLimit)
			}
			last = time.Now()
		}
		return nil
	})
}

func hostGoes(ctx context.Context, cfg Config) error {
	return configured(ctx, cfg, func(p *process, d *pluginv1.DescribeResponse) error {
		s, err := watch(ctx, p, d)
		if err != nil {
			return err
		}
		defer s.cancel()
		if _, err := s.api.Recv(); err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		if err := p.hangUp(); err != nil {
			return err
		}
		return p.awaitEnd(ctx, "the connection ended")
	})
}

func sigterm(ctx context.Context, cfg Config) error {
	return configured(ctx, cfg, func(p *process, d *pluginv1.DescribeResponse) error {
		s, err := watch(ctx, p, d)
		if err != nil {
			return err
		}
		defer s.cancel()
		if _, err := s.api.Recv(); err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		return p.awaitEnd(ctx, "SIGTERM")
	})
}

func stdout(ctx context.Context, cfg Config) error {
	return listed(ctx, cfg, func(p *process, s *stream) error {
		if err := p.hangUp(); err != nil {
			return err
		}
		if err := p.awaitEnd(ctx, "the connection ended"); err != nil {
			return err
		}
		p.output.Wait()
		if out := p.stray(); out != "" {
			return fmt.Errorf("standard output belongs to the handshake; after it came %q", out)
		}
		return nil
	})
}

// bridge runs the plugin under the bridge's supervisor.
func bridge(ctx context.Context, cfg Config) error {
	host, err := supervisor.NewHost("/tmp", slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	w := &bridgeSink{result: make(chan error, 1)}
	s, err := supervisor.New(host, supervisor.Spec{
		Registry:  cfg.Registry,
		Adapter:   cfg.Adapter,
		Command:   cfg.Command,
		Env:       cfg.Env,
		Config:    cfg.Config,
		Translate: cfg.Translate,
	}, w, slog.New(slog.DiscardHandler), nil)
	if err != nil {
		return errors.Join(err, host.Close())
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Within)
	defer cancel()
	done := make(chan error, 1)
	// Ends with ctx; waited for below.
	go func() { done <- s.Run(ctx) }()
	select {
	case err = <-w.result:
	case <-ctx.Done():
		st := s.Status()
		err = fmt.Errorf("the bridge is not synced within %v; phase %s, last error %q", cfg.Within, st.Phase, st.LastError)
	}
	cancel()
	return errors.Join(err, <-done, host.Close())
}

// bridgeSink waits for synced.
type bridgeSink struct {
	world  *World
	result chan error // capacity one: the first result counts
}

// Begin implements supervisor.Sink.
func (b *bridgeSink) Begin(d supervisor.Description) { b.world = newWorld(d.Collections) }

// Apply implements supervisor.Sink.
func (b *bridgeSink) Apply(resp *pluginv1.WatchResponse) error {
	err := b.world.apply(resp)
	if err != nil || b.world.Synced {
		b.tell(err)
	}
	return err
}

// Down implements supervisor.Sink.
func (b *bridgeSink) Down(err error) { b.tell(err) }

func (b *bridgeSink) tell(err error) {
	select {
	case b.result <- err:
	default: // a result is already set
	}
}
