package server

import (
	"cmp"
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
	"github.com/isthmus-mesh/isthmus/server/view"
)

const (
	// assessEvery is the time between two assessments.
	assessEvery = time.Second
	// startPatience is how long a plugin may take to start, and a first listing
	// to be complete, before that is a condition.
	startPatience = 30 * time.Second
	// listingPatience and silentPatience are those of the log and of the docs.
	listingPatience = 10 * time.Minute
	silentPatience  = 15 * time.Minute
	// restartWindow is the time in which maxRestarts are normal.
	restartWindow = 10 * time.Minute
	maxRestarts   = 3
	// alonePatience is how long a bridge may be without sinks.
	alonePatience = 10 * time.Minute
	// maxSinks bounds the sinks of one kind of condition; the rest are counted.
	maxSinks = 20
	// nearLimit is the share of a limit from which it is near.
	nearLimit = 0.8
	// certificateTime is how long before its end a certificate is reported: a
	// quarter of its life if that is shorter.
	certificateTime = 14 * 24 * time.Hour
	// readCertificates is the time between two readings of certificates that
	// the bridge shows to others as a client.
	readCertificates = time.Minute
	// clockStep is what a clock may be set by; stepShown is how long more is
	// reported.
	clockStep = 5 * time.Second
	stepShown = time.Hour
)

// assessor knows what one look at the bridge does not show. It is used by one
// goroutine.
type assessor struct {
	s        *Server
	restarts map[string]*restarts // by registry
	sinks    time.Time            // when there was a sink last
	clock    clock
	own      []ownCertificate
	ownAt    time.Time
}

// restarts are those of a plugin within restartWindow.
type restarts struct {
	count int // of all
	at    []time.Time
}

func newAssessor(s *Server) *assessor {
	return &assessor{s: s, restarts: make(map[string]*restarts), sinks: s.started, clock: clock{start: s.started}}
}

// assess keeps the list of conditions until ctx ends.
func (s *Server) assess(ctx context.Context) {
	a := newAssessor(s)
	tick := time.NewTicker(assessEvery)
	defer tick.Stop()
	for {
		now := time.Now()
		s.wrong.Set(now, a.assess(now))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Conditions returns what was wrong a second ago at most, the worst first.
func (s *Server) Conditions() []conditions.Condition { return s.wrong.Get() }

// Assess returns what is wrong at this moment, as far as one look shows it.
func (s *Server) Assess() []conditions.Condition { return newAssessor(s).assess(time.Now()) }

// assess returns what is wrong.
func (a *assessor) assess(now time.Time) (found []conditions.Condition) {
	s := a.s
	status := s.db.Registries()
	for i := range status {
		found = append(found, a.registry(now, &status[i])...)
	}
	found = append(found, s.nearLimits(status)...)
	found = append(found, a.ofSinks(now)...)
	found = append(found, s.judgeConsumers(now)...)
	for _, c := range s.access.Certificates() {
		found = append(found, judgeCertificate(now, "listener "+c.Listener, c.From, c.Until)...)
	}
	for _, c := range a.ownCertificates(now) {
		found = append(found, judgeCertificate(now, c.field, c.from, c.until)...)
	}
	for _, f := range s.access.Faults() {
		found = append(found, conditions.New(conditions.FilesNotRenewed, "listener "+f.Listener, time.Time{}, "files that have changed cannot be used: %v", f.Err))
	}
	if s.store != nil {
		if st := s.store.Status(); st.Writing != "" {
			found = append(found, conditions.New(conditions.StateFailing, "state.dir "+st.Dir, st.WritingSince, "the last good state cannot be written: %s", st.Writing))
		}
	}
	if last := s.loadedConfig().LastReload; last != nil && len(last.Problems) > 0 {
		p := last.Problems[0]
		text := strings.TrimPrefix(p.Field+": "+p.Reason, ": ")
		if n := len(last.Problems) - 1; n > 0 {
			text += fmt.Sprintf("; and %d more", n)
		}
		found = append(found, conditions.New(conditions.ReloadFailed, "configuration "+p.File, last.Time, "it was not reloaded (%s): %s", last.Trigger, text))
	}
	found = append(found, a.ofClock(now, status)...)
	for _, r := range s.access.Refusals() {
		c := conditions.New(conditions.AccessRefused, "listener "+r.Where, r.First, "it refused peers %s, the last of them %s: %s", times(r.Count), r.Peer, r.Why)
		c.Cure = sentence(r.Cure)
		found = append(found, c)
	}
	for _, r := range s.crowd.lately.Recent() {
		peer := ""
		if r.Peer != "" {
			peer = ", the last of " + r.Peer
		}
		found = append(found, conditions.New(conditions.ConnectionsRefused, r.Where, r.First, "connections or streams were refused %s%s: %s", times(r.Count), peer, r.Why))
	}
	return found
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// sentence returns text with a capital and a full stop.
func sentence(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + strings.TrimSuffix(text[1:], ".") + "."
}

// registry returns what is wrong with one registry.
func (a *assessor) registry(now time.Time, st *state.Status) (found []conditions.Condition) {
	subject, sup := "registry "+st.Registry, a.s.supervisor(st.Registry)
	add := func(kind conditions.Kind, since time.Time, format string, args ...any) *conditions.Condition {
		found = append(found, conditions.New(kind, subject, since, format, args...))
		return &found[len(found)-1]
	}
	why := cmp.Or(st.Down, st.Error)
	down := why != ""
	switch sup.Phase {
	case supervisor.PhaseDegraded, supervisor.PhaseRestarting, supervisor.PhaseFailed:
		down, why = true, cmp.Or(why, sup.LastError)
	case supervisor.PhaseStarting, supervisor.PhaseConfiguring:
		down, why = down || now.Sub(sup.Since) > startPatience, cmp.Or(why, sup.Waiting)
	}
	var c *conditions.Condition
	switch {
	case st.Released: // the one entry of a registry that is away, too
		c = add(conditions.ServesWithout, time.Time{}, "it is optional, and served without it, as the first listing is not complete: %s", a.s.unlisted(*st))
	case down:
		c = add(conditions.RegistryNotLive, sup.Since, "it cannot be followed (%s): %s", sup.Phase, cmp.Or(why, "no reason is known"))
	}
	if down {
		switch change := conditions.CauseOf(why).Change; {
		case sup.Phase == supervisor.PhaseFailed:
			c.Cure = "isthmus validate --config FILE shows what its plugin refuses; correct that and reload."
		case sup.Phase != supervisor.PhaseDegraded:
			c.Cure = "Read the plugin's own log lines before \"the plugin ended\"."
		case change != "":
			c.Cure = fmt.Sprintf("Look at the registry, and at its block in the configuration: %s. Neither the bridge nor istiod has to be restarted.", change)
		}
	}
	if len(st.Waits) > 0 && (down || now.Sub(st.WaitingSince) > startPatience) {
		add(conditions.TypesWaiting, st.WaitingSince, "its first listing is not complete: %s; %s", a.s.unlisted(*st), waitingWords(*st))
	}
	if !st.Restored.IsZero() {
		add(conditions.ServesRestored, a.s.started, "restored, %s", a.s.restoredSince(*st))
	}
	if n := a.restarted(now, &sup); n > maxRestarts {
		add(conditions.PluginRestarts, time.Time{}, "its plugin was started again %d times in %s, the last time because %s", n, words(restartWindow), cmp.Or(sup.LastError, "of no known reason"))
	}
	if !st.ListingSince.IsZero() && now.Sub(st.ListingSince) > listingPatience {
		add(conditions.ListingIncomplete, st.ListingSince, "its listing is not complete, with %d services so far", st.Services)
	}
	if sup.Phase == supervisor.PhaseLive && !sup.LastHeard.IsZero() && now.Sub(sup.LastHeard) > silentPatience {
		add(conditions.RegistrySilent, sup.LastHeard, "the plugin gives signs of life, and the registry has not answered it")
	}
	if p := st.Protection; p != nil && p.Pending {
		add(conditions.RemovalPaused, p.Since, "a removal that looks like an accident is paused until %s: it %s", p.Until.UTC().Format(time.RFC3339), p).
			Cure = fmt.Sprintf("If the registry is right, isthmus removals allow %[1]s. If it is wrong, repair it, and isthmus removals keep %[1]s if that takes longer. isthmus removals list shows what would go.", st.Registry)
	} else if p != nil {
		add(conditions.RemovalKept, p.Since, "an operator kept what the registry no longer has; it %s", p).
			Cure = fmt.Sprintf("isthmus removals allow %s removes it.", st.Registry)
	}
	return found
}

func words(d time.Duration) string {
	if d%time.Minute == 0 {
		return fmt.Sprintf("%d minutes", d/time.Minute)
	}
	return d.String()
}

// restarted returns how often a plugin was started again lately.
func (a *assessor) restarted(now time.Time, sup *supervisor.Status) int {
	r := a.restarts[sup.Registry]
	if r == nil || sup.Restarts < r.count { // a new one, of a reload
		r = &restarts{}
		a.restarts[sup.Registry] = r
	}
	for ; r.count < sup.Restarts; r.count++ {
		r.at = append(r.at, now)
	}
	r.at = slices.DeleteFunc(r.at, func(t time.Time) bool { return now.Sub(t) > restartWindow })
	return len(r.at)
}

// nearLimits returns the limits of which most is used.
func (s *Server) nearLimits(status []state.Status) (found []conditions.Condition) {
	check := func(subject, field string, have, limit int, what string) {
		if limit > 0 && float64(have) >= nearLimit*float64(limit) {
			c := conditions.New(conditions.LimitNear, subject, time.Time{}, "it has %d %s of the %d that %s allows", have, what, limit, field)
			c.Cure = fmt.Sprintf("%s: %d, if you expect so much; it applies after a restart.", field, 2*limit)
			found = append(found, c)
		}
	}
	for _, st := range status {
		subject := "registry " + st.Registry
		check(subject, "limits.services_per_registry", int(st.Services), s.limits.ServicesPerRegistry, "services")                 //nolint:gosec // what is in memory fits
		check(subject, "limits.resources_per_registry", int(st.Services+st.Instances), s.limits.ResourcesPerRegistry, "resources") //nolint:gosec // likewise
		check(subject, "limits.bytes_per_registry", st.Bytes, s.limits.BytesPerRegistry, "bytes")
	}
	check("listeners", "limits.streams", int(s.crowd.open.Load()), s.limits.Streams, "streams")
	return found
}

// ofSinks returns what is wrong with sinks.
func (a *assessor) ofSinks(now time.Time) (found []conditions.Condition) {
	all := a.s.streams.Troubled(now)
	if a.s.streams.Len() > 0 || !a.s.serves() {
		a.sinks = now
	}
	if now.Sub(a.sinks) > alonePatience {
		found = append(found, conditions.New(conditions.NoSinks, "listeners", a.sinks, "no istiod and no other sink is connected"))
	}
	counts := make(map[conditions.Kind]int)
	for i := range all {
		sink := &all[i]
		kind, since, problem := judgeSink(now, sink)
		if kind == "" {
			continue
		}
		if counts[kind]++; counts[kind] <= maxSinks {
			found = append(found, conditions.New(kind, "sink "+strings.TrimPrefix(sink.Node+" at "+sink.Address, " at "), since, "%s", problem))
		}
	}
	for kind, n := range counts {
		if n > maxSinks {
			found = append(found, conditions.New(kind, "sinks", time.Time{}, "%d more sinks", n-maxSinks))
		}
	}
	return found
}

// judgeSink returns the worst that is wrong with a sink, and no kind if nothing
// is.
func judgeSink(now time.Time, sink *stream.Status) (kind conditions.Kind, since time.Time, problem string) {
	for _, sub := range sink.Subscriptions {
		sent := sub.State == view.Sent.String()
		switch {
		case sent && sub.Oversize:
			return conditions.ResponseTooLarge, sub.SentAt, fmt.Sprintf("a response of %s has %d bytes, more than it receives", sub.TypeURL, sub.Bytes)
		case sent && now.Sub(sub.SentAt) > stream.Patience:
			kind, since, problem = conditions.SinkLags, sub.SentAt, fmt.Sprintf("it has not acknowledged a response of %s; %d changes wait", sub.TypeURL, sub.Lag)
		case sub.State == view.Current.String() && sub.AckedRevision < sub.SentRevision && kind == "":
			kind, since, problem = conditions.SinkRefuses, sub.SentAt, fmt.Sprintf("it refused a response of %s: %s", sub.TypeURL, sub.LastNack)
		}
	}
	return kind, since, problem
}

// serves reports whether there are ports.
func (s *Server) serves() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.ports) > 0
}

// judgeCertificate returns whether a certificate is not valid, or will not be
// for long.
func judgeCertificate(now time.Time, subject string, from, until time.Time) []conditions.Condition {
	at := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	switch soon := until.Add(-min(certificateTime, until.Sub(from)/4)); {
	case now.Before(from):
		c := conditions.New(conditions.CertificateInvalid, subject, time.Time{}, "its own certificate is not valid before %s", at(from))
		c.Cure = "Is the clock right? If so, use another certificate until then; the file is read again without a reload."
		return []conditions.Condition{c}
	case now.After(until):
		return []conditions.Condition{conditions.New(conditions.CertificateInvalid, subject, until, "its own certificate expired at %s", at(until))}
	case now.After(soon):
		return []conditions.Condition{conditions.New(conditions.CertificateExpires, subject, soon, "its own certificate expires at %s", at(until))}
	}
	return nil
}

// ownCertificate is one that the bridge shows as a client.
type ownCertificate struct {
	field       string
	from, until time.Time
}

// ownCertificates returns the certificates that the bridge shows as a client.
func (a *assessor) ownCertificates(now time.Time) []ownCertificate {
	if now.Sub(a.ownAt) >= readCertificates {
		a.own, a.ownAt = clientCertificates(a.s.config()), now
	}
	return a.own
}

// clientCertificates reads the certificates of blocks in which the bridge is a
// client. Those that cannot be read are left out: whoever uses them says why.
func clientCertificates(cfg *config.Config) (out []ownCertificate) {
	for i := range cfg.Sinks {
		out = append(out, readCertificate(fmt.Sprintf("sinks[%d].tls.cert_file", i), cfg.Sinks[i].TLS.CertFile)...)
	}
	return append(out, readCertificate("telemetry.tls.cert_file", cfg.Telemetry.TLS.CertFile)...)
}

// readCertificate returns the first certificate of a file, none if there is no
// such file.
func readCertificate(field, file string) []ownCertificate {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil
	}
	return []ownCertificate{{field, cert.NotBefore, cert.NotAfter}}
}

// CheckCertificates returns what is wrong with the certificates of a
// configuration, whose files can be read.
func CheckCertificates(cfg *config.Config) (found []conditions.Condition) {
	now := time.Now()
	all := clientCertificates(cfg)
	for _, l := range cfg.Listen.All() {
		all = append(all, readCertificate(l.Path+".tls.cert_file", l.TLS.CertFile)...)
	}
	for _, c := range all {
		found = append(found, judgeCertificate(now, c.field, c.from, c.until)...)
	}
	return found
}

// clock finds steps of the machine's clock.
type clock struct {
	start  time.Time     // with a monotonic reading
	offset time.Duration // of the wall clock against the monotonic one
	step   time.Duration
	at     time.Time // of the step
}

// look compares the wall clock with the monotonic one, which is never set.
func (c *clock) look(wall time.Time, elapsed time.Duration) {
	offset := wall.Round(0).Sub(c.start.Round(0)) - elapsed
	if d := offset - c.offset; d.Abs() > clockStep {
		c.step, c.at = d, wall
	}
	c.offset = offset
}

// ofClock returns what shows that the clock is wrong.
func (a *assessor) ofClock(now time.Time, status []state.Status) (found []conditions.Condition) {
	a.clock.look(now, now.Sub(a.clock.start))
	if c := &a.clock; c.step != 0 && now.Sub(c.at).Abs() < stepShown {
		direction := "forward"
		if c.step < 0 {
			direction = "back"
		}
		found = append(found, conditions.New(conditions.ClockWrong, "clock", c.at, "it was set %s by %s, or the machine slept", direction, c.step.Abs().Round(time.Second)))
	}
	for _, st := range status {
		if ahead := st.Restored.Sub(now); ahead > clockStep {
			found = append(found, conditions.New(conditions.ClockWrong, "clock", time.Time{}, "the last good state of registry %s is from %s, which is in the future", st.Registry, st.Restored.UTC().Format(time.RFC3339)))
			break
		}
	}
	return found
}
