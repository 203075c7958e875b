package consul

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/plugin"
)

const (
	// perTransport is how many watches share one http.Transport over HTTP/2.
	// Consul allows 250 streams on a connection, so each transport needs one
	// connection. Over HTTP/1.1 all watches share one transport, which bounds
	// their connections.
	perTransport = 200
	// maxBody bounds one answer, in bytes. Consul's own limit for one service
	// is far lower.
	maxBody = 512 << 20
	// answerTimeout bounds one query, in addition to the requested wait.
	answerTimeout = time.Minute
)

// httpTokenHeader is the header that carries the ACL token.
const httpTokenHeader = "X-Consul-Token"

// clients provides API clients that share connections: over HTTP/2 perTransport
// users per transport, over HTTP/1.1 all users one transport.
type clients struct {
	target target
	auth   auth
	turns  *turns
	waits  *waits
	hosts  *hosts
	stale  *staleness
	// newTransport returns an http.RoundTripper; tests replace it.
	newTransport func() http.RoundTripper

	mu    sync.Mutex // guards slots and each slot's users
	slots []*slot    // the first one is permanent
}

// slot is one transport and the number of its users.
type slot struct {
	client    *api.Client
	transport http.RoundTripper
	users     int
}

func newClients(c Config) (*clients, error) {
	targets := c.targets()
	t := targets[0] // Validate accepted them
	if _, err := c.TLS.Config("tls"); err != nil {
		return nil, err
	}
	cl := &clients{target: t, turns: newTurns(c.MaxConnections, c.scopes()), waits: &waits{most: time.Duration(c.Wait)}, hosts: &hosts{}, stale: newStaleness(time.Duration(c.MaxStale))}
	for _, t := range targets {
		cl.hosts.all = append(cl.hosts.all, t.host)
	}
	dialer := &net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}
	cl.auth = auth{
		token: string(c.Token), tokenFile: c.TokenFile,
		namespaced: len(c.Namespaces) > 0, partitioned: c.Partition != "" || len(c.Partitions) > 0,
	}
	// A file missing at the start is a configuration error, later a fault that
	// may pass. The same is true of TLS files.
	if _, err := cl.auth.current(); err != nil {
		return nil, &plugin.FieldError{Field: "token_file", Reason: errors.Unwrap(err).Error()}
	}
	cl.newTransport = func() http.RoundTripper {
		transport := &http.Transport{
			DialTLSContext:      c.TLS.DialHTTP("tls", dialer),
			ForceAttemptHTTP2:   true,
			MaxConnsPerHost:     cl.turns.connections,
			MaxIdleConnsPerHost: cl.turns.connections,
			IdleConnTimeout:     90 * time.Second,
			// Pings detect a dead connection before the wait ends.
			HTTP2: &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
		}
		transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			if t.socket != "" {
				network, address = "unix", t.socket
			}
			conn, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &clientConn{Conn: conn}, nil
		}
		return transport
	}
	first, err := cl.newSlot()
	if err != nil {
		return nil, err
	}
	cl.slots = []*slot{first}
	return cl, nil
}

// at returns the address that is used.
func (c *clients) at() target {
	t := c.target
	t.host = c.hosts.current()
	return t
}

// newSlot returns a transport with its client.
func (c *clients) newSlot() (*slot, error) {
	transport := c.newTransport()
	client, err := api.NewClient(&api.Config{
		Address:    c.target.host,
		Scheme:     c.target.scheme,
		PathPrefix: c.target.prefix,
		// authTransport sets the token; a value here keeps the client from
		// reading a file that the environment names.
		Token: "set by authTransport",
		HttpClient: &http.Client{
			Transport: &authTransport{auth: c.auth, hosts: c.hosts, multiplexed: &c.turns.multiplexed, next: transport, first: make(chan struct{}, 1)},
			// Consul redirects only malformed paths; a redirect would lead to
			// the answer of another query.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	})
	if err != nil {
		return nil, fmt.Errorf("consul client: %w", err)
	}
	return &slot{client: client, transport: transport}, nil
}

// acquire returns a slot for one watch, which must release it.
func (c *clients) acquire() *slot {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.slots {
		if s.users < perTransport {
			s.users++
			return s
		}
	}
	s, err := c.newSlot()
	if err != nil {
		panic("BUG: a client like this one could be made before: " + err.Error())
	}
	s.users++
	c.slots = append(c.slots, s)
	return s
}

// of returns the API client for the next query of a slot's user.
func (c *clients) of(s *slot) *api.Client {
	if c.turns.multiplexed.Load() {
		return s.client
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.slots[0].client
}

// release releases a slot. The connections of a slot without users are closed
// once idle.
func (c *clients) release(s *slot) {
	c.mu.Lock()
	s.users--
	idle := s.users == 0
	c.mu.Unlock()
	if idle {
		s.closeIdle()
	}
}

func (s *slot) closeIdle() {
	if t, ok := s.transport.(interface{ CloseIdleConnections() }); ok {
		t.CloseIdleConnections()
	}
}

// auth holds the headers that every request carries, and those that none may.
type auth struct {
	token, tokenFile        string
	namespaced, partitioned bool
}

// current returns the current token, "" for none.
func (a auth) current() (string, error) {
	if a.tokenFile == "" {
		return a.token, nil
	}
	token, err := plugin.ReadSecret(a.tokenFile)
	if err != nil {
		return "", &tokenError{err}
	}
	return token, nil
}

// anonymous reports whether requests carry no token. Consul does not report to
// anonymous clients what it filtered.
func (a auth) anonymous() bool { return a.tokenFile == "" && (a.token == "" || a.token == "anonymous") }

// tokenError reports a token_file without a readable token.
type tokenError struct{ err error }

func (e *tokenError) Error() string { return "token_file: " + e.err.Error() }
func (e *tokenError) Unwrap() error { return e.err }

// authTransport makes requests carry the configured values only: api.NewClient
// reads tokens, namespaces and partitions from CONSUL_* variables of the
// environment.
type authTransport struct {
	auth
	hosts       *hosts
	multiplexed *atomic.Bool // set to whether the last answer was multiplexed
	next        http.RoundTripper

	// Requests over https share a connection once there is one. While connected
	// is false they are sent one at a time, holding first, or each would dial.
	first     chan struct{}
	connected atomic.Bool
}

// RoundTrip implements http.RoundTripper.
func (t *authTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	token, err := t.current()
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Del(httpTokenHeader)
	r.Header.Del("Authorization")
	if token != "" {
		r.Header.Set(httpTokenHeader, token)
	}
	q := r.URL.Query()
	if !t.namespaced {
		q.Del("ns")
	}
	if !t.partitioned {
		q.Del("partition")
	}
	r.URL.RawQuery = q.Encode()
	var res *http.Response
	for range t.hosts.all {
		host := t.hosts.current()
		r.URL.Host, r.Host = host, host
		if res, err = t.send(r); err == nil || r.Context().Err() != nil || !notReached(err) {
			break
		}
		t.hosts.fail(host, err)
	}
	if err != nil {
		return nil, err
	}
	t.hosts.answered(r.URL.Host)
	if shared := res.ProtoMajor >= 2; shared != t.multiplexed.Load() {
		t.multiplexed.Store(shared)
	}
	res.Body = http.MaxBytesReader(nil, res.Body, maxBody)
	if res.StatusCode >= 500 && q.Has("wait") && res.Header.Get("X-Consul-Index") == "" {
		defer res.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(res.Body, 4096)) // what there is of it
		return nil, &proxyError{api.StatusError{Code: res.StatusCode, Body: string(body)}}
	}
	return res, nil
}

// send sends the request, alone while there is no connection to share.
func (t *authTransport) send(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" || t.connected.Load() {
		res, err := t.next.RoundTrip(r)
		if err != nil && r.Context().Err() == nil {
			t.connected.Store(false)
		}
		return res, err
	}
	select {
	case t.first <- struct{}{}:
	case <-r.Context().Done():
		return nil, context.Cause(r.Context())
	}
	done := sync.OnceFunc(func() { <-t.first })
	defer done()
	// The turn ends when there is a connection, not with the answer, which may
	// take minutes.
	trace := &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) {
		t.connected.Store(true)
		done()
	}}
	return t.next.RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), trace)))
}

// clientConn detects a server that responds before a request was sent, and so
// refuses the connection. Consul does so above its limit of connections.
type clientConn struct {
	net.Conn
	asked atomic.Bool
}

// Write implements net.Conn.
func (c *clientConn) Write(p []byte) (int, error) {
	c.asked.Store(true)
	return c.Conn.Write(p)
}

// Read implements net.Conn.
func (c *clientConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && !c.asked.Load() {
		answer := string(p[:n])
		if line, _, _ := strings.Cut(answer, "\r\n"); strings.HasPrefix(line, "HTTP/1.") && strings.Contains(line, " 429") {
			_, body, _ := strings.Cut(answer, "\r\n\r\n")
			return 0, &refusedError{strings.TrimSpace(body)}
		}
	}
	return n, err
}

// refusedError reports a connection on which a 429 arrived before any request.
type refusedError struct{ body string }

func (e *refusedError) Error() string { return "connection refused with status 429: " + e.body }

// faultKind is a kind of fault, ordered from those that concern the registry to
// those that concern one service. Faults are shown in this order.
type faultKind uint8

const (
	// faultUnreachable means that no answer came: no listener, a network or TLS
	// error, or a timeout.
	faultUnreachable faultKind = iota
	// faultServer means that Consul answered with a server error, such as a
	// missing leader.
	faultServer
	// faultDenied means that Consul does not accept the token.
	faultDenied
	// faultLimit means that Consul, or a proxy before it, limits connections or
	// requests.
	faultLimit
	// faultRequest means that Consul rejects the query, usually for its filter
	// expression.
	faultRequest
	// faultFiltered means that the token may not read everything.
	faultFiltered
	// faultEmpty means that an answer is implausibly empty.
	faultEmpty
	// faultHeld means that instances missing since an outage are retained for
	// the grace period.
	faultHeld
)

// fault is an error and its consequences.
type fault struct {
	kind faultKind
	// outage means that the registry may have lost data: removals wait for the
	// grace period.
	outage bool
	// interrupted means that the connection broke during an answer. That alone
	// is not an outage: proxies and load balancers close connections that they
	// consider idle.
	interrupted bool
	// connections means that a faultLimit concerns connections.
	connections bool
	err         error
}

func (f *fault) Error() string { return f.err.Error() }
func (f *fault) Unwrap() error { return f.err }

// errAnswerTimeout is the cause of a query's cancellation at its timeout.
var errAnswerTimeout = errors.New("no answer in time")

// classify converts an error of the API client to a fault.
func classify(err error, t target) *fault {
	if f, ok := errors.AsType[*fault](err); ok {
		return f
	}
	if status, ok := errors.AsType[api.StatusError](err); ok {
		return classifyStatus(status)
	}
	if p, ok := errors.AsType[*proxyError](err); ok {
		return classifyStatus(p.StatusError)
	}
	if refused, ok := errors.AsType[*refusedError](err); ok {
		return connectionLimit(refused.body)
	}
	if e, ok := errors.AsType[*tokenError](err); ok {
		return &fault{kind: faultDenied, err: fmt.Errorf("%w; put the token there, readable for this process", e)}
	}
	f := &fault{kind: faultUnreachable, outage: true}
	// url.Error contains the whole query, which differs for each service.
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Err == nil {
		// Its text would be a panic's.
		op = &net.OpError{Op: op.Op, Net: op.Net, Source: op.Source, Addr: op.Addr, Err: errors.New("it broke")}
		err = op
	}
	_, tooLong := errors.AsType[*http.MaxBytesError](err)
	switch {
	case errors.Is(err, errAnswerTimeout) || errors.Is(err, context.DeadlineExceeded):
		err = errAnswerTimeout
	case op != nil && op.Op == "dial":
		err = op // without the local port
	case tooLong:
		f.kind, f.outage = faultServer, false
		err = fmt.Errorf("answer is longer than %d MiB", maxBody>>20)
	case isTLS(err):
	default:
		f.interrupted = true
		if op != nil {
			err = fmt.Errorf("%s: %w", op.Op, op.Err)
		}
	}
	f.err = fmt.Errorf("consul at %s cannot be reached: %w", t, err)
	return f
}

func isTLS(err error) bool {
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return true
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return true
	}
	_, ok := errors.AsType[tls.AlertError](err)
	return ok
}

// classifyStatus converts an answer with a status other than 200 to a fault.
func classifyStatus(s api.StatusError) *fault {
	body := plugin.Excerpt(s.Body)
	switch {
	case s.Code == http.StatusForbidden || s.Code == http.StatusUnauthorized:
		return &fault{kind: faultDenied, err: fmt.Errorf(
			"consul refuses the token (%d: %s); check token or token_file, and that the token has service_prefix \"\" read and node_prefix \"\" read", s.Code, body)}
	case s.Code == http.StatusTooManyRequests && strings.Contains(body, "concurrent connections"):
		return connectionLimit(body)
	case s.Code == http.StatusTooManyRequests:
		return &fault{kind: faultLimit, err: fmt.Errorf(
			"consul refuses more requests (429: %s); raise limits.request_limits of the agent", body)}
	case strings.Contains(body, "boolean expression") || strings.Contains(body, "Failed to create boolean expression evaluator"):
		return &fault{kind: faultRequest, err: fmt.Errorf("consul does not accept filter (%d: %s); see its filtering language", s.Code, body)}
	case s.Code >= 500:
		return &fault{kind: faultServer, outage: true, err: fmt.Errorf("consul answers with an error (%d: %s)", s.Code, body)}
	default:
		return &fault{kind: faultRequest, err: fmt.Errorf("consul does not accept the query (%d: %s); check address, datacenters, namespaces and partition", s.Code, body)}
	}
}

// connectionLimit returns the fault of a refused connection, with the text of
// Consul's answer.
func connectionLimit(body string) *fault {
	return &fault{kind: faultLimit, connections: true, err: fmt.Errorf(
		"consul refuses more connections from here (429: %s); use an https address, which needs few, lower max_connections, "+
			"or raise limits.http_max_conns_per_client of the agent, which all programs on this machine share", body)}
}
