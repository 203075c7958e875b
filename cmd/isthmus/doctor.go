package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/isthmus-mesh/isthmus/internal/doctor"
	"github.com/isthmus-mesh/isthmus/server"
	"github.com/isthmus-mesh/isthmus/server/admin"
	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/status"
)

func newDoctor() *cobra.Command {
	var (
		output  = &oneOf{"text", []string{"text", "json"}}
		timeout time.Duration
		meshes  []string
		istiods []string
		address string
		look    string
		c       client
	)
	cmd := &cobra.Command{
		Use:   "doctor --config FILE",
		Short: "Find what keeps registries, the bridge and istiod from working together",
		Long: `Find what keeps registries, the bridge and istiod from working together. Each finding states its effect, and which line to change.

It follows the registries of the configuration with their own plugins until each has listed everything, or has said why it cannot. This checks
whether they can be reached, tokens, TLS, permissions, what is left out, and how near the limits are. Of each consumer it checks permissions,
waypoints, and whether what Kubernetes has is what is served; --kubeconfig reads that as somebody else than the bridge. If a bridge runs at the admin address of
the configuration, it is asked what is wrong with it. No port is opened and nothing is changed, so you can run this next to a bridge with
the same configuration.

--mesh-config checks the mesh configuration in FILE: istiod's own, its ConfigMap, or the meshConfig of an IstioOperator or of Helm values.
--istiod asks a running istiod for its own, at its debug port 15014 or 8080. --address asks a bridge which sinks it has and what they
acknowledged. With the last two together it also finds resources that istiod rejected, as istiod acknowledges these, too.

The exit code is 1 if it finds something; notes do not count.`,
		Example: `  isthmus doctor --config isthmus.yaml
  kubectl -n istio-system get configmap istio -o yaml | isthmus doctor --config isthmus.yaml --mesh-config -
  kubectl -n istio-system port-forward deploy/istiod 15014 &
  isthmus doctor --config isthmus.yaml --istiod 127.0.0.1:15014 --address 127.0.0.1:15080`,
		Args: usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	f := cmd.Flags()
	f.VarP(output, "output", "o", "format of the findings")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "how long to wait for the registries")
	f.StringArrayVar(&meshes, "mesh-config", nil, "`FILE` with a mesh configuration, - for standard input; may be given several times")
	f.StringArrayVar(&istiods, "istiod", nil, "`ADDRESS` of the debug port of an istiod, as host:port; may be given several times")
	f.StringVar(&look, "kubeconfig", "", "kubeconfig `FILE` with which to read what consumers have in Kubernetes, and its Gateways; otherwise as the bridge")
	f.StringVarP(&address, "address", "a", "", "admin `ADDRESS` of the running bridge, host:port or unix:PATH")
	c.flags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		err := c.check()
		if timeout <= 0 {
			err = errors.Join(err, fmt.Errorf("--timeout %s: must be more than 0", timeout))
		}
		if address != "" {
			err = errors.Join(err, checkAddress(address, config.Default.Listen.Admin.Address))
		}
		for _, a := range istiods {
			if doctor.PortOf(a) == "" {
				err = errors.Join(err, fmt.Errorf("--istiod %s: must be host:port, for example 127.0.0.1:15014", a))
			}
		}
		if err != nil {
			return usageError(cmd, err)
		}
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		cfg, err := loadConfig(ctx, *file, config.Log{Level: "error"}.Logger(io.Discard))
		if err != nil {
			return err
		}
		memory, _ := config.Memory(os.DirFS("/"), os.LookupEnv)
		cfg.Limits = cfg.Fit(memory)
		report := &doctor.Report{Looked: []string{}, Findings: []doctor.Finding{}}
		if err := examineRegistries(ctx, report, &cfg, timeout, look); err != nil {
			return err
		}
		bridge := bridgeOf(report, &cfg)
		for _, name := range meshes {
			m, err := readMesh(cmd.InOrStdin(), name)
			if err != nil {
				return fmt.Errorf("--mesh-config: %w", err)
			}
			report.Add("mesh configuration "+name, m.Check(bridge, doctor.Version{})...)
		}
		if address == "" {
			askBridge(ctx, report, &c, cfg.Listen.Admin.Address)
		}
		examineMesh(ctx, report, bridge, &c, istiods, address)
		if output.value == "json" {
			enc := json.NewEncoder(cmd.OutOrStdout())
			enc.SetIndent("", "  ")
			enc.SetEscapeHTML(false)
			err = enc.Encode(report)
		} else {
			err = report.Write(cmd.OutOrStdout(), colorful(cmd.OutOrStdout()))
		}
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
		if n := report.Bad(); n > 0 {
			return errors.New(doctor.Count(n, "finding", "findings"))
		}
		return nil
	}
	return cmd
}

func readMesh(stdin io.Reader, name string) (*doctor.Mesh, error) {
	data, err := readFile(stdin, name)
	if err != nil {
		return nil, err
	}
	return doctor.ReadMesh(name, data)
}

// examineRegistries follows the registries until each has listed what it holds
// or says why it cannot.
func examineRegistries(ctx context.Context, report *doctor.Report, cfg *config.Config, timeout time.Duration, look string) error {
	known := append(config.Problems{}, server.CheckListeners(cfg)...)
	if _, err := checkPlugins(ctx, cfg, config.Log{Level: "error"}.Logger(io.Discard), known...); err != nil {
		return err
	}
	s, err := newServer(*cfg, server.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return runServer(ctx, s) }) // without listeners
	group.Go(func() error {
		defer cancel()
		limit := time.NewTimer(timeout)
		defer limit.Stop()
		again := time.NewTicker(lookAgain)
		defer again.Stop()
		for {
			all, ok := s.Overview()
			if ok && !pending(all.Registries) {
				diagnose(report, cfg, &all)
				unstated(ctx, report, cfg, s)
				return examineConsumers(ctx, report, cfg, s, look)
			}
			select {
			case <-again.C:
			case <-limit.C:
				diagnose(report, cfg, &all)
				return nil
			case <-ctx.Done():
				return nil //nolint:nilerr // a signal, or the error of the server
			}
		}
	})
	return group.Wait()
}

// lookAgain is the time between two looks at registries and sinks.
const lookAgain = 50 * time.Millisecond

// pending reports whether a registry has neither listed what it holds nor said
// why it cannot.
func pending(registries []admin.Registry) bool {
	for i := range registries {
		if r := &registries[i]; !r.Synced && r.Error == "" && r.LastError == "" {
			return true
		}
	}
	return false
}

// nearLimit is the share of a limit from which doctor speaks of it.
const nearLimit = 0.8

// diagnose reports on the registries.
func diagnose(report *doctor.Report, cfg *config.Config, o *admin.Overview) {
	for i := range o.Registries {
		r := &o.Registries[i]
		subject := "registry " + r.Served.Registry
		var found []doctor.Finding
		add := func(check string, severity doctor.Severity, field, problem, change string) {
			if p := cfg.Position(field); p.Line > 0 {
				problem = fmt.Sprintf("%s (%s:%d:%d)", problem, cfg.File(), p.Line, p.Column)
			}
			found = append(found, doctor.Finding{Check: check, Severity: severity, Subject: subject, Problem: problem, Change: change})
		}
		at := fmt.Sprintf("registries[%d]", i)
		why := cmp.Or(r.Error, r.LastError)
		switch {
		case !r.Synced && why != "":
			check, field, change := causeOf(at, why)
			add(check, doctor.Failure, field, "it cannot be followed: "+why, change)
		case !r.Synced:
			add("registry-slow", doctor.Failure, at+".config", "it has not been listed in time, and gives no reason: "+r.Sentence, "")
		case r.Error != "":
			check, field, change := causeOf(at, r.Error)
			add(check, doctor.Failure, field, "it was listed, and cannot be followed: "+r.Error, change)
		case r.Served.Services == 0 && r.Resources == 0:
			add("registry-empty", doctor.Warning, at+".config", "it has no service: is the namespace, the datacenter or the filter the right one, and may the token read services?", at+".config")
		}
		for _, l := range []struct {
			field       string
			have, limit int
		}{
			{"limits.services_per_registry", int(r.Served.Services), cfg.Limits.ServicesPerRegistry},
			{"limits.resources_per_registry", int(r.Served.Services + r.Served.Instances), cfg.Limits.ResourcesPerRegistry},
			{"limits.bytes_per_registry", r.Bytes, cfg.Limits.BytesPerRegistry},
		} {
			if float64(l.have) >= nearLimit*float64(l.limit) {
				add("registry-limit", doctor.Warning, l.field, fmt.Sprintf("it has %d of the %d that %s allows; what comes above is not served", l.have, l.limit, l.field), fmt.Sprintf("%s: %d", l.field, 2*l.have))
			}
		}
		// Conflicts are a finding of their own.
		if rejected := slices.DeleteFunc(slices.Clone(r.Problems), func(p state.Problem) bool { return p.Field == "conflicts" }); len(rejected) > 0 {
			p := rejected[0]
			change := "isthmus dump --rejected lists all of them"
			if p.Field != "" {
				change = p.Field + "; " + change
			}
			add("registry-rejected", doctor.Warning, at, fmt.Sprintf("it has %s that cannot be served unchanged, the first: %s: %s", doctor.Count(len(rejected), "thing", "things"), p.ID, p.Reason), change)
		}
		if n := len(r.Skipped); n > 0 {
			// Names that the configuration leaves out are the least surprising.
			first := r.Skipped[max(0, slices.IndexFunc(r.Skipped, func(p state.Problem) bool { return !strings.HasPrefix(p.ID, "config.") }))]
			report.Add("", doctor.Finding{
				Check: "registry-left-out", Severity: doctor.Note, Subject: subject,
				Problem: fmt.Sprintf("it has %s skipped, the first: %s: %s", doctor.Count(max(n, r.SkippedCount), "thing", "things"), first.ID, first.Reason),
				Change:  "isthmus dump --rejected lists all of them",
			})
		}
		if r.Detail != "" {
			report.Add("", doctor.Finding{Check: "registry-detail", Severity: doctor.Note, Subject: subject, Problem: r.Detail})
		}
		report.Add(fmt.Sprintf("%s: %s, %s", subject, doctor.Count(int(r.Served.Services), "service", "services"), doctor.Count(int(r.Served.Instances), "instance", "instances")), found...)
	}
	between, own := undecided(cfg, o.Conflicts)
	if len(between) > 0 {
		x, hosts := between[0], slices.CompactFunc(slices.Clone(between), func(a, b status.Conflict) bool { return a.Host == b.Host }) // sorted by host
		report.Add("", doctor.Finding{
			Check: "conflict", Severity: doctor.Warning, Subject: "registries",
			Problem: fmt.Sprintf("several registries have %s without a rule in conflicts, the first: %s is served from %s, and that of %s is shadowed", doctor.Count(len(hosts), "host", "hosts"), x.Host, x.Owner, x.Registry),
			Change:  fmt.Sprintf("conflicts: [{hosts: [%q], policy: merge}], or policy: priority if that is intended", x.Host),
		})
	}
	if len(own) > 0 {
		x := own[0]
		report.Add("", doctor.Finding{
			Check: "conflict-within", Severity: doctor.Warning, Subject: "registry " + x.Registry,
			Problem: fmt.Sprintf("%s of one registry have a host that another service of it has, the first: %s is served from %s, and %s is shadowed", doctor.Count(len(own), "service", "services"), x.Host, x.OwnerName, x.Name),
			Change:  fmt.Sprintf("translate.host, so that each has a host of its own, or conflicts: [{hosts: [%q], registry: %s, policy: merge}] if both are one service", x.Host, x.Registry),
		})
	}
}

// examineConsumers reports on what is written to, now that what is served is
// known.
func examineConsumers(ctx context.Context, report *doctor.Report, cfg *config.Config, s *server.Server, look string) error {
	for i := range cfg.Consumers.Kubernetes {
		k := &cfg.Consumers.Kubernetes[i]
		all, err := s.Inspect(ctx, k, look)
		if err != nil {
			return err
		}
		subject := "consumer " + k.Name
		var found []doctor.Finding
		for _, f := range all {
			severity := doctor.Failure
			if f.Note {
				severity = doctor.Note
			}
			found = append(found, doctor.Finding{Check: "consumer-" + f.Check, Severity: severity, Subject: subject, Problem: f.Problem, Change: f.Cure})
		}
		report.Add(subject+": its rights, stubs and waypoints are as they should be", found...)
	}
	return nil
}

// maxExplained is the number of services of a registry whose ports are looked
// at.
const maxExplained = 20

// unstated reports ports whose protocol nothing states, which are served with
// the default. Whether it is the right one only the service knows.
func unstated(ctx context.Context, report *doctor.Report, cfg *config.Config, s *server.Server) {
	looked := make(map[string]int)
	guessed := make(map[string][]string)
	for svc := range s.Services() {
		name := svc.Registry
		if looked[name] == maxExplained || svc.ShadowedBy != "" || len(svc.Hosts) == 0 {
			continue
		}
		looked[name]++
		e := s.Explain(ctx, svc.Hosts[0])
		for i := range e.Registries {
			r := &e.Registries[i]
			if r.Registry != name {
				continue
			}
			for _, explained := range r.Services {
				if i := slices.IndexFunc(explained.Steps, func(s admin.ExplainedStep) bool { return s.Rule == "translate.protocol.default" }); i >= 0 {
					step := explained.Steps[i]
					guessed[name] = append(guessed[name], fmt.Sprintf("%s: %s: %s", svc.Hosts[0], step.Subject, step.Text))
					break
				}
			}
		}
	}
	for i := range cfg.Registries {
		name := cfg.Registries[i].Name
		list := guessed[name]
		if len(list) == 0 {
			continue
		}
		report.Add("", doctor.Finding{
			Check: "registry-protocol", Severity: doctor.Note, Subject: "registry " + name,
			Problem: fmt.Sprintf("of the first %s, %d have a port whose protocol nothing states; if it is not the default, routing by path, retries and metrics of HTTP do not work. The first: %s",
				doctor.Count(looked[name], "service", "services"), len(list), list[0]),
			Change: fmt.Sprintf("registries[%d].translate.protocol: default, or keys and tags that state it; isthmus explain HOST shows it for a host", i),
		})
	}
}

// undecided returns the conflicts for which the configuration has no rule:
// those between registries, and those within one.
func undecided(cfg *config.Config, all []status.Conflict) (between, own []status.Conflict) {
	for _, x := range all {
		list, registry := &between, ""
		if x.Registry == x.Owner {
			list, registry = &own, x.Registry
		}
		if !slices.ContainsFunc(cfg.Conflicts, func(r config.Conflict) bool {
			return r.Registry == registry && slices.ContainsFunc(r.Hosts, func(pattern string) bool {
				ok, _ := path.Match(pattern, x.Host) // validated by Parse
				return ok
			})
		}) {
			*list = append(*list, x)
		}
	}
	return between, own
}

// causeOf classifies why the registry at a path of the configuration cannot be
// followed.
func causeOf(at, why string) (check, field, change string) {
	c := conditions.CauseOf(why)
	if c.Field == "" {
		return c.Check, at, ""
	}
	return c.Check, at + "." + c.Field, at + "." + c.Change
}

// bridgeOf describes the listeners of a configuration to the checks of istiod.
func bridgeOf(report *doctor.Report, cfg *config.Config) doctor.Bridge {
	b := doctor.Bridge{Stubs: len(cfg.Consumers.Kubernetes) > 0}
	for _, c := range server.CheckCertificates(cfg) {
		severity := doctor.Failure
		if c.Severity != conditions.Critical {
			severity = doctor.Warning
		}
		report.Add("", doctor.Finding{Check: string(c.Kind), Severity: severity, Subject: c.Subject, Problem: c.Problem, Change: c.Cure})
	}
	for _, l := range cfg.Listen.All() {
		if l.Field == "listen.admin" || l.Field == "listen.mcp" {
			continue
		}
		b.Views = b.Views || !l.View.IsZero() || slices.ContainsFunc(l.Allow, func(a config.Allow) bool { return !a.View.IsZero() })
		if port := doctor.PortOf(l.Address); port != "" && port != "0" {
			b.Ports = append(b.Ports, port)
		}
		if !l.TLS.Enabled() || b.TLS {
			continue
		}
		b.TLS = true
		b.ClientCertificate, b.ClientAuthField = l.TLS.ClientAuth == config.ClientAuthRequire, l.Path+".tls.client_auth"
		if l.TLS.WorkloadAPI != "" {
			continue // the certificate is not known here
		}
		cert, err := doctor.ReadCertificate(l.TLS.CertFile)
		if err != nil {
			report.Add("", doctor.Finding{Check: "listener-certificate", Severity: doctor.Failure, Subject: l.Path + ".tls.cert_file", Problem: err.Error()})
		}
		b.Certificate = cert
	}
	return b
}

// settleSinks is how long a sink may take to acknowledge what it was sent.
const settleSinks = 5 * time.Second

// settleRejected is how long a change may take to be sent to all sinks and to
// be acknowledged, in a large mesh.
const settleRejected = 30 * time.Second

// askBridge reports what a bridge at the configured admin address says is
// wrong. There may be none, and it may not let this caller in.
func askBridge(ctx context.Context, report *doctor.Report, c *client, address string) {
	if address == "" || strings.HasSuffix(address, ":0") {
		return
	}
	if wrong, err := doctor.ReadConditions(ctx, getter(c, address)); err == nil {
		report.Add(fmt.Sprintf("bridge %s: it reports nothing that is wrong", address), doctor.CheckConditions(wrong)...)
	}
}

// examineMesh asks the running bridge and istiods.
func examineMesh(ctx context.Context, report *doctor.Report, b doctor.Bridge, c *client, istiods []string, address string) {
	unreached := func(subject string, err error, change string) {
		report.Add("", doctor.Finding{Check: "unreached", Severity: doctor.Failure, Subject: subject, Problem: err.Error(), Change: change})
	}
	var served *doctor.Served
	get := getter(c, address)
	if address != "" {
		before, later, err := lookAtSinks(ctx, get)
		if err == nil {
			served, err = doctor.ReadServed(ctx, get, later.List)
		}
		var wrong []doctor.Condition
		if err == nil {
			wrong, err = doctor.ReadConditions(ctx, get)
		}
		if err != nil {
			unreached("bridge "+address, err, "--address: the address after admin= in the line \"serving\" of the bridge's log")
		} else {
			report.Add(fmt.Sprintf("bridge %s: it reports nothing that is wrong", address), doctor.CheckConditions(wrong)...)
			report.Add(fmt.Sprintf("bridge %s: %s, each has acknowledged what it was sent", address, doctor.Count(len(later.List), "sink", "sinks")), doctor.CheckSinks(before, later, settleSinks)...)
		}
	}
	for _, a := range istiods {
		i, err := doctor.ReadIstiod(ctx, a, getter(&client{}, a))
		if err != nil {
			unreached("istiod "+a, err, "--istiod: a debug port, 15014 or 8080; ENABLE_DEBUG_ON_HTTP=false turns it off")
			continue
		}
		found := i.Check(b)
		// What a view does not show is not rejected.
		if served != nil && !b.Views {
			rejected, err := rejectedBy(ctx, i, a, get, served)
			if err != nil {
				unreached("bridge "+address, err, "")
			}
			found = append(found, i.ReportRejected(rejected)...)
		}
		report.Add("istiod "+a, found...)
	}
}

// lookAtSinks reads the sinks twice, the second time when an istiod is there
// and all have acknowledged what they were sent, or after settleSinks.
func lookAtSinks(ctx context.Context, get doctor.Getter) (before, later doctor.Sinks, err error) {
	if before.Oversize, err = doctor.ReadOversize(ctx, get); err == nil {
		before.List, err = doctor.ReadSinks(ctx, get)
	}
	if err == nil {
		later.List, err = until(ctx, get, settleSinks, func(later []doctor.Sink) bool {
			return doctor.Connected(later) && !doctor.Unsettled(before.List, later)
		})
	}
	if err == nil {
		later.Oversize, err = doctor.ReadOversize(ctx, get)
	}
	return before, later, err
}

// rejectedBy returns what an istiod rejected of what a bridge serves. What is
// under way is waited for.
func rejectedBy(ctx context.Context, i *doctor.Istiod, address string, get doctor.Getter, served *doctor.Served) ([]doctor.Rejected, error) {
	before := i.Rejected(served)
	if len(before) == 0 {
		return nil, nil
	}
	sinks, err := until(ctx, get, settleRejected, func(sinks []doctor.Sink) bool { return doctor.Acknowledged(sinks, served.Revision) })
	if err != nil || !doctor.Acknowledged(sinks, served.Revision) {
		return nil, err // other findings are about what is not acknowledged
	}
	// The bridge first: what istiod has by then is no older.
	if served, err = doctor.ReadServed(ctx, get, sinks); err == nil {
		i, err = doctor.ReadIstiod(ctx, address, getter(&client{}, address))
	}
	if err != nil {
		return nil, err
	}
	return doctor.Still(before, i.Rejected(served)), nil
}

// until reads the sinks until they are as wanted, or the time is over.
func until(ctx context.Context, get doctor.Getter, most time.Duration, ok func([]doctor.Sink) bool) ([]doctor.Sink, error) {
	limit := time.NewTimer(most)
	defer limit.Stop()
	look := time.NewTicker(5 * lookAgain)
	defer look.Stop()
	for {
		sinks, err := doctor.ReadSinks(ctx, get)
		if err != nil || ok(sinks) {
			return sinks, err
		}
		select {
		case <-look.C:
		case <-limit.C:
			return sinks, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// getter returns a function that reads paths of an address.
func getter(c *client, address string) doctor.Getter {
	return func(ctx context.Context, path string) ([]byte, error) {
		ctx, cancel := context.WithTimeout(ctx, callTime)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.url(address, path), nil)
		if err != nil {
			return nil, err
		}
		resp, err := c.do(req, address)
		if err != nil {
			return nil, err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(io.LimitReader(resp.Body, maxPage))
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s answered %s: %.200s", req.URL, resp.Status, strings.TrimSpace(string(text)))
		}
		return text, err
	}
}

// maxPage bounds a page of istiod: that of its configuration has some 2 kB for
// each service with ten endpoints.
const maxPage = 1 << 30
