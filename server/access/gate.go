package access

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/internal/wait"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// Reasons of a refusal, as the metric has them.
const (
	reasonPlaintext = "plaintext" // on a listener with TLS
	reasonTLS       = "tls"       // on a listener without
	reasonHandshake = "handshake"
	reasonRule      = "rule"
	reasonReview    = "review" // of a token, which could not be made
	reasonBusy      = "busy"   // with passwords of the same address

	reasonHost = "host" // of a request, which is not a name of the listener
)

// Actions of those that are refused, as the audit has them. Requests have their
// method and path.
const (
	actionConnect = "connect"
	actionStream  = "open a stream"
)

// HandshakeTime bounds a TLS handshake.
const HandshakeTime = 10 * time.Second

// Gate stands before one listener. Its policy can be replaced at any time.
type Gate struct {
	listener string // such as "listen.xds 127.0.0.1:15051"
	streams  *stream.Listener
	policy   atomic.Pointer[Policy]
	m        *Metrics
	log      *slog.Logger
	audit    *Audit // may be nil

	mu    sync.Mutex
	conns map[*session]struct{} // with a certificate of the client; guarded by mu, as the rest
	seen  int                   // generation of the policy at the last recheck

	logins       *logins   // hashes of passwords
	peers, files Sparingly // lines of the log, by address; about files
}

// NewGate returns the gate of a listener. What it refuses goes to the audit,
// which may be nil.
func NewGate(l *stream.Listener, p *Policy, m *Metrics, audit *Audit, log *slog.Logger) *Gate {
	g := &Gate{
		listener: l.Name, streams: l, m: m, audit: audit, log: log.With("listener", l.Name), conns: make(map[*session]struct{}),
		seen: p.generation(), logins: newLogins(),
	}
	g.policy.Store(p)
	m.add(g)
	return g
}

// Close removes the gate from the metrics, and closes its policy.
func (g *Gate) Close() {
	g.m.remove(g)
	g.policy.Load().Close()
}

// Set replaces the policy, which the gate closes later. It ends the streams
// that the new one does not allow; the others see what it has for them from
// then on.
func (g *Gate) Set(p *Policy) {
	// A stream has its admission before it loads the policy, so one that is not
	// found is checked against this one.
	defer g.policy.Swap(p).Close()
	g.apply(p, func(*guarded) bool { return true })
}

// apply applies a policy to open streams.
func (g *Gate) apply(p *Policy, which func(*guarded) bool) {
	var all sync.WaitGroup
	for _, a := range g.streams.Admissions() {
		s, ok := a.(*guarded)
		if !ok || !which(s) {
			continue
		}
		apply := func() {
			if c, err := s.identified(s.entry.Context(), g, p); err != nil {
				s.entry.End(errRevoked)
			} else if a, ok := p.admit(c); ok {
				s.admitted(p, a)
			} else {
				s.entry.End(errRevoked)
			}
		}
		if p.wantsReview(&s.caller) {
			all.Go(apply) // waits at most for the API server
		} else {
			apply()
		}
	}
	all.Wait()
}

// identify returns the caller with its service account, if a rule of the policy
// asks for that. An error is [errReview].
func (g *Gate) identify(ctx context.Context, p *Policy, c Caller) (Caller, error) {
	if !p.wantsReview(&c) {
		return c, nil
	}
	account, outcome, err := p.review.account(ctx, c.Address, c.Token)
	if outcome != "" {
		g.m.reviews.WithLabelValues(g.field(), outcome).Inc()
	}
	c.account = account
	return c, err
}

// cureReview is what to do when tokens cannot be reviewed.
const cureReview = "see token_review: the API server must be reached, and let the bridge create tokenreviews, as the ClusterRole system:auth-delegator does"

var (
	errRevoked = errors.New("the rules of the listener, or what the caller was let in with, have changed")
	errAged    = status.Error(codes.Unavailable, "the connection has reached max_age of the listener; open another")
)

// refuse counts and records a refusal, and logs at most one per address and
// minute. Who is what was verified of the peer.
func (g *Gate) refuse(reason, who, address, action, why, cure string) {
	g.m.refused.WithLabelValues(g.field(), reason).Inc()
	g.m.lately.Note(g.listener, address, why, cure)
	g.audit.Record(who, address, action, AuditRefused, slog.String("listener", g.field()), slog.String("reason", reason), slog.String("why", why))
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host, _, _ = strings.Cut(address, "#") // unix:PATH#NUMBER
	}
	if g.peers.Allow(host) {
		g.log.Warn("a peer was refused", "peer", address, "reason", why, "cure", cure)
	}
}

// field returns the listener's field of the configuration.
func (g *Gate) field() string {
	field, _, _ := strings.Cut(g.listener, " ")
	return field
}

// checkFiles logs why renewed files of the policy cannot be used, at most once
// a minute.
func (g *Gate) checkFiles(p *Policy) {
	if err := p.fault(); err != nil && g.files.Allow("") {
		g.log.Error("renewed files of a listener cannot be used; those read before stay in use, and a missing one admits nobody", "err", err)
	}
}

// fault returns why a file of the policy is not the one in use.
func (p *Policy) fault() error {
	var errs []error
	if p.tls != nil {
		errs = append(errs, p.tls.fault())
	}
	for i := range p.rules {
		if t := p.rules[i].tokens; t != nil {
			errs = append(errs, t.fault())
		}
		if u := p.rules[i].users; u != nil {
			errs = append(errs, u.fault())
		}
	}
	if p.review != nil {
		errs = append(errs, p.review.fault())
	}
	return errors.Join(errs...)
}

// Credentials returns the transport security of a gRPC server at this gate.
func (g *Gate) Credentials() credentials.TransportCredentials { return transport{g} }

type transport struct{ g *Gate }

// ServerHandshake implements credentials.TransportCredentials.
func (t transport) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn := &peeked{Conn: raw}
	encrypted, err := conn.encrypted()
	if err != nil {
		return nil, nil, err
	}
	p := t.g.policy.Load()
	address := raw.RemoteAddr().String()
	switch {
	case p.tls == nil && encrypted:
		t.g.refuse(reasonTLS, "", address, actionConnect, "it speaks TLS, and this listener is plaintext", "set tls in the listener's block, or have the peer dial plaintext")
		return nil, nil, errors.New("TLS on a plaintext listener")
	case !encrypted:
		// On a listener with TLS each of its streams is refused with words,
		// which a closed connection has not.
		return conn, plaintext{}, nil
	}
	secured, info, err := credentials.NewTLS(p.tls.get()).ServerHandshake(conn)
	t.g.checkFiles(p)
	if err != nil {
		t.g.refuse(reasonHandshake, "", address, actionConnect, err.Error(), "compare the peer's certificate and authorities with the listener's tls block")
		return secured, info, err
	}
	if known, ok := info.(credentials.TLSInfo); ok && len(known.State.PeerCertificates) > 0 {
		s := t.g.session(secured, known)
		return s, s.identified, nil
	}
	return secured, info, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (transport) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("not a client")
}

// Info implements credentials.TransportCredentials.
func (transport) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (t transport) Clone() credentials.TransportCredentials { return t }

// OverrideServerName implements credentials.TransportCredentials.
func (transport) OverrideServerName(string) error { return errors.New("not a client") }

// plaintext is the AuthInfo of a connection without TLS.
type plaintext struct{ credentials.CommonAuthInfo }

// AuthType implements credentials.AuthInfo.
func (plaintext) AuthType() string { return "plaintext" }

// tlsRecord is the first byte of a TLS handshake; RFC 8446, section 5.1.
const tlsRecord = 0x16

// peeked is a connection of which a byte was read ahead.
type peeked struct {
	net.Conn
	first []byte
}

// encrypted reports whether the peer begins a TLS handshake.
func (c *peeked) encrypted() (bool, error) {
	b := make([]byte, 1)
	if _, err := c.Conn.Read(b); err != nil {
		return false, err
	}
	c.first = b
	return b[0] == tlsRecord, nil
}

// Read implements net.Conn.
func (c *peeked) Read(b []byte) (int, error) {
	if len(c.first) > 0 && len(b) > 0 {
		n := copy(b, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	return c.Conn.Read(b)
}

// refuseDelay is how long a refused stream of the legacy protocol is kept
// waiting: Pilots 1.6 to 1.8 come back at once, without end.
const refuseDelay = time.Second

// Stream is an interceptor, after that of the [stream.Listener], that lets only
// allowed callers open streams, and ends them when they are no longer allowed.
func (g *Gate) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	ctx := ss.Context()
	s := &guarded{entry: stream.EntryOf(ctx), caller: callerOf(ctx), changed: make(chan struct{}), opened: time.Now(), spread: ageSpread * rand.Float64()}
	if p, ok := peer.FromContext(ctx); ok {
		if known, ok := p.AuthInfo.(identified); ok {
			s.opened, s.spread = known.opened, known.spread
		}
	}
	s.entry.SetAdmission(s)
	if ok, err := s.admit(ctx, g); !ok {
		err := g.denied(ctx, g.policy.Load(), s, err)
		if strings.Contains(info.FullMethod, "istio.mcp") {
			wait.Pause(ctx, refuseDelay+rand.N(refuseDelay), nil)
		}
		return err
	}
	err := next(srv, ss)
	if errors.Is(context.Cause(ctx), errRevoked) {
		p := g.policy.Load()
		_, cause := s.identified(context.WithoutCancel(ctx), g, p)
		return g.denied(ctx, p, s, cause)
	}
	return err
}

// denied counts a refused stream, and returns its status. The cause is
// [errReview] or nil.
func (g *Gate) denied(ctx context.Context, p *Policy, s *guarded, cause error) error {
	address := ""
	if at, ok := peer.FromContext(ctx); ok {
		address = at.Addr.String()
	}
	c := s.known()
	if v, ok := p.verify(c); ok {
		c = v
	} else {
		c.TLS = nil // what was verified once is not any more
	}
	who := c.identity(nil)
	if cause != nil {
		g.refuse(reasonReview, who, address, actionStream, cause.Error(), cureReview)
		return status.Error(codes.Unavailable, errReview.Error()+"; try again")
	}
	c = s.known()
	why := "no rule in allow of " + g.field() + " fits: " + c.String()
	if p.tls != nil && s.caller.TLS == nil {
		const why = "this port speaks TLS, and the connection is plaintext"
		g.refuse(reasonPlaintext, who, address, actionStream, why, "an istiod before 1.26, and one whose tlsSettings are not mode SIMPLE, dials plaintext: see docs/security.md")
		return status.Error(codes.Unauthenticated, why+"; dial with TLS: in istiod's configSources tlsSettings of mode SIMPLE, from 1.26 on")
	}
	g.refuse(reasonRule, who, address, actionStream, why, "add a rule for it to the listener's allow, if it may")
	code := codes.PermissionDenied
	if p.wantsSecret() && s.caller.Token == "" && !s.caller.verified() {
		code = codes.Unauthenticated
	}
	return status.Error(code, why)
}

// wantsSecret reports whether a rule asks for a token, password or certificate.
func (p *Policy) wantsSecret() bool {
	return slices.ContainsFunc(p.rules, func(r rule) bool { return r.wantsSecret() })
}

// guarded is the admission of a stream.
type guarded struct {
	entry  *stream.Entry
	caller Caller // without its service account

	mu sync.Mutex
	// guarded by mu
	account string             // of the caller's token, "" if there is none known
	by      config.TokenReview // that account is known by
	opened  time.Time          // the connection if it has a certificate, else the stream
	spread  float64            // of max_age, of which so much less
	until   time.Time          // when the certificate ends, zero without one
	aged    time.Time          // when the stream is too old, zero for never

	granted sync.Mutex
	// guarded by granted, which is not held while the API server is asked
	views    []config.View
	changed  chan struct{} // closed and replaced when views change
	identity string
}

// admit reports whether the policy allows the stream, and sets its views. An
// error is [errReview].
func (s *guarded) admit(ctx context.Context, g *Gate) (bool, error) {
	for {
		p := g.policy.Load()
		c, err := s.identified(ctx, g, p)
		if err != nil {
			return false, err
		}
		a, ok := p.admit(c)
		if !ok {
			return false, nil
		}
		s.admitted(p, a)
		if g.policy.Load() == p {
			return true, nil // a later policy is set by Set
		}
	}
}

// identified returns the caller with its service account, if the policy asks
// for that. A stream's account is asked for once: when the rules change while
// the API server cannot be reached, streams go on.
func (s *guarded) identified(ctx context.Context, g *Gate, p *Policy) (Caller, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.caller
	if p.review == nil || s.account != "" && s.by == p.review.block {
		c.account = s.account
		return c, nil
	}
	c, err := g.identify(ctx, p, c)
	if c.account != "" {
		s.account, s.by = c.account, p.review.block
	}
	return c, err
}

// known returns the caller with the service account that was found last.
func (s *guarded) known() Caller {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.caller
	c.account = s.account
	return c
}

// Identity implements [stream.Admission].
func (s *guarded) Identity() string {
	s.granted.Lock()
	defer s.granted.Unlock()
	return s.identity
}

// Views implements [stream.Admission]. The stream is restricted to all of them
// together.
func (s *guarded) Views() (filters []view.Filter, changed <-chan struct{}) {
	s.granted.Lock()
	defer s.granted.Unlock()
	for _, v := range s.views {
		filters = append(filters, view.Filter{
			Registries: v.Registries, Namespaces: v.Namespaces, Hosts: v.Hosts, Collections: v.Collections, Shards: v.Shards(),
		})
	}
	return filters, s.changed
}

func (s *guarded) grant(views []config.View, identity string) {
	s.granted.Lock()
	defer s.granted.Unlock()
	s.identity = identity
	if reflect.DeepEqual(s.views, views) {
		return
	}
	s.views = views
	close(s.changed)
	s.changed = make(chan struct{})
}

// callerOf returns the caller of a stream.
func callerOf(ctx context.Context) (c Caller) {
	if p, ok := peer.FromContext(ctx); ok {
		c.Address = addressOf(p.Addr.String())
		switch info := p.AuthInfo.(type) {
		case credentials.TLSInfo:
			c.TLS = &info.State
		case identified:
			c.TLS = &info.State
		}
	}
	md, _ := metadata.FromIncomingContext(ctx)
	for _, v := range md.Get("authorization") {
		c.authorize(v)
	}
	return c
}

func addressOf(hostPort string) netip.Addr {
	a, err := netip.ParseAddrPort(hostPort)
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr()
}

// authorize reads an Authorization header: RFC 6750, section 2.1, and RFC 7617.
func (c *Caller) authorize(header string) {
	scheme, value, _ := strings.Cut(header, " ")
	switch value = strings.TrimSpace(value); {
	case strings.EqualFold(scheme, "Bearer"):
		c.Token = value
	case strings.EqualFold(scheme, "Basic"):
		if text, err := base64.StdEncoding.DecodeString(value); err == nil {
			c.User, c.Password, _ = strings.Cut(string(text), ":")
		}
	}
}

// Listener returns l with the TLS of the gate, for an HTTP server.
func (g *Gate) Listener(l net.Listener) net.Listener { return httpListener{l, g} }

type httpListener struct {
	net.Listener
	g *Gate
}

// Accept implements net.Listener. The handshake is that of the HTTP server,
// which answers plaintext with words.
func (l httpListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	p := l.g.policy.Load()
	if p.tls == nil {
		return conn, nil
	}
	c := p.tls.get().Clone()
	l.g.checkFiles(p)
	c.NextProtos = []string{"http/1.1"}
	return tls.Server(conn, c), nil
}

// Handler returns next for callers that are allowed. Requests for the open
// paths are not checked. The role of a caller is in the request's context; see
// [RoleOf].
func (g *Gate) Handler(next http.Handler, open func(path string) bool) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p := g.policy.Load()
		if open(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		action := r.Method + " " + clip.Text(r.URL.Path, maxPath)
		c := Caller{Address: addressOf(r.RemoteAddr), TLS: r.TLS}
		if v, ok := p.verify(c); ok {
			c = v
		}
		refuse := func(code int, reason, why, cure string) {
			g.refuse(reason, c.identity(nil), r.RemoteAddr, action, why, cure)
			http.Error(w, strings.ToLower(http.StatusText(code)), code)
		}
		if !p.ofListener(r.Host) {
			const cure = "name it in hosts of listen.admin, if the listener is reached by it"
			why := "the Host " + clip.Text(r.Host, maxPath) + " is not a name of this listener"
			g.refuse(reasonHost, c.identity(nil), r.RemoteAddr, action, why, cure)
			http.Error(w, why+"; "+cure, http.StatusMisdirectedRequest)
			return
		}
		c.authorize(r.Header.Get("Authorization"))
		c, err := g.identify(r.Context(), p, c)
		if err != nil {
			refuse(http.StatusServiceUnavailable, reasonReview, err.Error(), cureReview)
			return
		}
		if err := p.login(r.Context(), g.logins, c.Address, &c); err != nil {
			w.Header().Set("Retry-After", "1")
			refuse(http.StatusTooManyRequests, reasonBusy, err.Error(), "wait, and see who sends wrong passwords")
			return
		}
		a, ok := p.check(c)
		if !ok {
			code := http.StatusForbidden
			if p.wantsSecret() {
				code = http.StatusUnauthorized
				w.Header().Add("WWW-Authenticate", "Bearer")
				if p.hasUsers() {
					w.Header().Add("WWW-Authenticate", `Basic realm="admin", charset="UTF-8"`)
				}
			}
			refuse(code, reasonRule, "no rule in allow of "+g.field()+" fits: "+c.String(), "add a rule for it to the listener's allow, if it may")
			return
		}
		ctx := context.WithValue(r.Context(), roleKey{}, a.role)
		if Safe(r.Method) {
			next.ServeHTTP(w, r.WithContext(ctx))
			return
		}
		said, detail := &answered{responseWriter: w}, new(string)
		next.ServeHTTP(said, r.WithContext(context.WithValue(ctx, detailKey{}, detail)))
		more := []slog.Attr{slog.String("listener", g.field()), slog.String("role", a.role.String()), slog.Int("status", cmp.Or(said.code, http.StatusOK))}
		if *detail != "" {
			more = append(more, slog.String("detail", *detail))
		}
		if len(said.text) > 0 {
			more = append(more, slog.String("why", strings.TrimSpace(string(said.text))))
		}
		g.audit.Record(a.identity, r.RemoteAddr, action, said.result(), more...)
	})
}

// maxPath bounds the path and the host of a request in logs, in bytes.
const maxPath = 200

// responseWriter is embedded without the name of its field.
type responseWriter = http.ResponseWriter

// Safe reports whether a method changes nothing; RFC 9110, section 9.2.1.
func Safe(method string) bool {
	return method == http.MethodGet || method == http.MethodHead || method == http.MethodOptions
}

func (p *Policy) hasUsers() bool {
	for i := range p.rules {
		if p.rules[i].users != nil {
			return true
		}
	}
	return false
}

type roleKey struct{}

// RoleOf returns the role of the caller of a request that passed
// [Gate.Handler].
func RoleOf(ctx context.Context) (role Role, ok bool) {
	role, ok = ctx.Value(roleKey{}).(Role)
	return role, ok
}
