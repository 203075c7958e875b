package access

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/crypto/bcrypt"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

const patience = time.Minute

// buffer is the log of a gate.
type buffer = testwait.Buffer

func policy(t *testing.T, l config.Listener) *Policy {
	t.Helper()
	p, err := New(l)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func newGate(t *testing.T, l config.Listener) (*Gate, *prometheus.Registry, *buffer) {
	t.Helper()
	reg, log := prometheus.NewRegistry(), new(buffer)
	g := NewGate(stream.NewServer(nil).Listener("listen.xds 127.0.0.1:1"), policy(t, l), NewMetrics(reg), NewAudit(slog.New(slog.NewTextHandler(log, nil))), slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(g.Close)
	return g, reg, log
}

// serve runs a gRPC server at the gate, whose streams send back what they get,
// and returns its address.
func serve(t *testing.T, g *Gate) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(g.Credentials()), grpc.ConnectionTimeout(patience), grpc.ChainStreamInterceptor(g.streams.Stream, g.Stream))
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "test", HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "echo", ServerStreams: true, ClientStreams: true, Handler: func(_ any, ss grpc.ServerStream) error {
			got := make(chan error, 1)
			go func() { // ends with the stream
				for {
					m := new(emptypb.Empty)
					if err := ss.RecvMsg(m); err != nil {
						got <- err
						return
					}
					if err := ss.SendMsg(m); err != nil {
						got <- err
						return
					}
				}
			}()
			select {
			case err := <-got:
				if errors.Is(err, io.EOF) {
					return nil
				}
				return err
			case <-ss.Context().Done():
				return ss.Context().Err()
			}
		}}},
	}, nil)
	var all sync.WaitGroup
	all.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() {
		s.Stop()
		all.Wait()
	})
	return l.Addr().String()
}

// open opens a stream, and returns it after the first answer.
func open(t *testing.T, address string, creds credentials.TransportCredentials, token string) (grpc.ClientStream, error) {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	if token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, "/test/echo")
	if err != nil {
		return nil, err
	}
	return stream, echo(stream)
}

func echo(stream grpc.ClientStream) error {
	if err := stream.SendMsg(new(emptypb.Empty)); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return stream.RecvMsg(new(emptypb.Empty))
}

// dialTLS returns credentials that trust ca and present own, unless it is nil.
func dialTLS(t *testing.T, ca, own *testcert.Certificate, name string) credentials.TransportCredentials {
	t.Helper()
	pem, err := os.ReadFile(ca.Cert)
	if err != nil {
		t.Fatal(err)
	}
	c := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: name, MinVersion: tls.VersionTLS12}
	c.RootCAs.AppendCertsFromPEM(pem)
	if own != nil {
		pair, err := tls.LoadX509KeyPair(own.Cert, own.Key)
		if err != nil {
			t.Fatal(err)
		}
		// Sent even if the server names other authorities.
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	return credentials.NewTLS(c)
}

func write(t *testing.T, file, text string) string {
	t.Helper()
	if !filepath.IsAbs(file) {
		file = filepath.Join(t.TempDir(), file)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// renew puts a certificate in the place of another.
func renew(t *testing.T, old, by *testcert.Certificate) {
	t.Helper()
	for to, from := range map[string]string{old.Cert: by.Cert, old.Key: by.Key} {
		text, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		write(t, to+".new", string(text))
		if err := os.Rename(to+".new", to); err != nil {
			t.Fatal(err)
		}
	}
}

func refused(g *Gate, reason string) float64 {
	return testutil.ToFloat64(g.m.refused.WithLabelValues("listen.xds", reason))
}

func TestTLS(t *testing.T) {
	server, other := testcert.New(t, "bridge"), testcert.New(t, "bridge")
	known, unknown := testcert.New(t, "client"), testcert.New(t, "client")
	expired := testcert.New(t, "client", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) })
	authorities := func(certs ...*testcert.Certificate) string {
		var all strings.Builder
		for _, c := range certs {
			text, err := os.ReadFile(c.Cert)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(text)
		}
		return write(t, "ca.pem", all.String())
	}
	simple := config.Listener{TLS: config.ListenerTLS{CertFile: server.Cert, KeyFile: server.Key}}
	mutual, asked := simple, simple
	mutual.TLS.ClientCAFile, mutual.TLS.ClientAuth = authorities(known, expired), config.ClientAuthRequire
	asked.TLS.ClientCAFile, asked.TLS.ClientAuth = mutual.TLS.ClientCAFile, config.ClientAuthRequest
	newest := simple
	newest.TLS.MinVersion = "1.3"
	old := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}) //nolint:gosec // the version is what is tested

	for name, c := range map[string]struct {
		listener config.Listener
		creds    credentials.TransportCredentials
		want     string // in the error
		reason   string // counted
	}{
		"plaintext":                       {config.Listener{}, insecure.NewCredentials(), "", ""},
		"TLS":                             {simple, dialTLS(t, server, nil, "bridge"), "", ""},
		"TLS with a certificate":          {simple, dialTLS(t, server, known, "bridge"), "", ""},
		"mutual":                          {mutual, dialTLS(t, server, known, "bridge"), "", ""},
		"request, with":                   {asked, dialTLS(t, server, known, "bridge"), "", ""},
		"request, without":                {asked, dialTLS(t, server, nil, "bridge"), "", ""},
		"plaintext to TLS":                {simple, insecure.NewCredentials(), "this port speaks TLS, and the connection is plaintext; dial with TLS: in istiod's configSources tlsSettings of mode SIMPLE", reasonPlaintext},
		"TLS to plaintext":                {config.Listener{}, dialTLS(t, server, nil, "bridge"), "", reasonTLS},
		"another authority":               {simple, dialTLS(t, other, nil, "bridge"), "unknown authority", reasonHandshake},
		"another name":                    {simple, dialTLS(t, server, nil, "elsewhere"), "not elsewhere", reasonHandshake},
		"mutual, without":                 {mutual, dialTLS(t, server, nil, "bridge"), "", reasonHandshake},
		"mutual, unknown":                 {mutual, dialTLS(t, server, unknown, "bridge"), "", reasonHandshake},
		"mutual, expired":                 {mutual, dialTLS(t, server, expired, "bridge"), "", reasonHandshake},
		"request, unknown":                {asked, dialTLS(t, server, unknown, "bridge"), "", reasonHandshake},
		"an old version where 1.3 is set": {newest, old, "protocol version", reasonHandshake},
	} {
		t.Run(name, func(t *testing.T) {
			g, reg, log := newGate(t, c.listener)
			_, err := open(t, serve(t, g), c.creds, "")
			if c.reason == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q in it", err, c.want)
			}
			// A handshake of 1.3 ends for the client before the server has
			// seen its certificate.
			testwait.Eventually(t, patience, "the refusal to be counted and logged once", func() (string, bool) {
				return log.String(), refused(g, c.reason) > 0 && strings.Count(log.String(), "a peer was refused") == 1
			})
			if n, err := testutil.GatherAndCount(reg, "isthmus_access_refused_total"); n != 7 || err != nil {
				t.Errorf("%d series, %v", n, err)
			}
		})
	}
}

// Renewed files hold for the next connection, and open streams go on. Files
// that cannot be used change nothing.
func TestRenewal(t *testing.T) {
	first, second := testcert.New(t, "bridge"), testcert.New(t, "bridge", func(c *x509.Certificate) { c.NotAfter = time.Now().Add(48 * time.Hour) })
	trustsFirst, trustsSecond := dialTLS(t, first, nil, "bridge"), dialTLS(t, second, nil, "bridge")
	g, reg, log := newGate(t, config.Listener{TLS: config.ListenerTLS{CertFile: first.Cert, KeyFile: first.Key}})
	address := serve(t, g)
	before, err := open(t, address, trustsFirst, "")
	if err != nil {
		t.Fatal(err)
	}
	expiry := func() float64 {
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "isthmus_tls_certificate_expiry_timestamp_seconds" {
				return f.GetMetric()[0].GetGauge().GetValue()
			}
		}
		return 0
	}
	was := expiry()

	write(t, first.Key, "not a key")
	if _, err := open(t, address, trustsFirst, ""); err != nil {
		t.Errorf("with a broken file the certificate before is not used: %v", err)
	}
	if !strings.Contains(log.String(), "renewed files of a listener cannot be used; those read before stay in use") {
		t.Errorf("nothing is said of the broken file: %s", log)
	}
	renew(t, first, second)
	if _, err := open(t, address, trustsSecond, ""); err != nil {
		t.Errorf("the renewed certificate is not used: %v", err)
	}
	if now := expiry(); now <= was {
		t.Errorf("the certificate ends at %f, was %f", now, was)
	}
	if err := echo(before); err != nil {
		t.Errorf("a stream of before: %v", err)
	}
}

// checked returns the role of a caller whose password was looked at.
func checked(t *testing.T, p *Policy, c Caller) Role {
	t.Helper()
	if err := p.login(t.Context(), newLogins(), c.Address, &c); err != nil {
		t.Error(err)
	}
	return p.Check(c)
}

func TestRules(t *testing.T) {
	id, err := url.Parse("spiffe://mesh/ns/istio-system/sa/istiod")
	if err != nil {
		t.Fatal(err)
	}
	with := func(ids ...*url.URL) *tls.ConnectionState {
		leaf := &x509.Certificate{URIs: ids, DNSNames: []string{"pilot.example.org"}}
		return &tls.ConnectionState{ServerName: "bridge", PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{{leaf}}}
	}
	named := func(leaf x509.Certificate) *tls.ConnectionState {
		return &tls.ConnectionState{PeerCertificates: []*x509.Certificate{&leaf}, VerifiedChains: [][]*x509.Certificate{{&leaf}}}
	}
	unverified := with(id)
	unverified.VerifiedChains = nil
	tokens := write(t, "tokens", "# of tools\n\nfirst\n second \n")
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	users := write(t, "users", "ann:"+string(hash)+"\n")
	at := netip.MustParseAddr
	for name, c := range map[string]struct {
		peer config.Peer
		yes  []Caller
		no   []Caller
	}{
		"block": {
			config.Peer{CIDR: "10.1.0.0/16"},
			[]Caller{{Address: at("10.1.2.3")}, {Address: at("::ffff:10.1.2.3")}},
			[]Caller{{}, {Address: at("10.2.0.1")}, {Address: at("::1")}},
		},
		"address": {config.Peer{CIDR: "fe80::1"}, []Caller{{Address: at("fe80::1%eth0")}}, []Caller{{Address: at("fe80::2")}}},
		"SPIFFE": {
			config.Peer{SPIFFE: "spiffe://mesh/ns/*/sa/istiod"},
			[]Caller{{TLS: with(id)}},
			[]Caller{{}, {TLS: with()}, {TLS: unverified}, {TLS: with(id, id)}, {TLS: with(id.JoinPath("more"))}, {TLS: &tls.ConnectionState{}}},
		},
		"name": {
			config.Peer{SAN: "*.example.org"},
			[]Caller{{TLS: with()}},
			[]Caller{{}, {TLS: unverified}, {TLS: &tls.ConnectionState{ServerName: "pilot.example.org"}}},
		},
		"name in another field": {
			config.Peer{SAN: "pilot.*"},
			[]Caller{{TLS: with()}},
			[]Caller{
				{TLS: named(x509.Certificate{EmailAddresses: []string{"pilot.example.org", "pilot.x@example.org"}})},
				{TLS: named(x509.Certificate{URIs: []*url.URL{{Path: "pilot.example.org"}, {Scheme: "pilot.a", Opaque: "b"}}})},
			},
		},
		"address in its certificate": {
			config.Peer{SAN: "10.1.*"},
			[]Caller{{TLS: named(x509.Certificate{IPAddresses: []net.IP{net.IPv4(10, 1, 2, 3)}})}},
			[]Caller{{TLS: named(x509.Certificate{DNSNames: []string{"10.1.2.3"}})}},
		},
		"URI": {
			config.Peer{SAN: "https://pilot.example.org/*"},
			[]Caller{{TLS: named(x509.Certificate{URIs: []*url.URL{{Scheme: "https", Host: "pilot.example.org", Path: "/x"}}})}},
			[]Caller{{TLS: with()}},
		},
		"server name": {config.Peer{SNI: "bri*"}, []Caller{{TLS: with()}}, []Caller{{}, {TLS: &tls.ConnectionState{}}}},
		"token":       {config.Peer{TokenFile: tokens}, []Caller{{Token: "first"}, {Token: "second"}}, []Caller{{}, {Token: "firs"}, {Token: "# of tools"}, {User: "first"}}},
		"user": {
			config.Peer{PasswordFile: users},
			[]Caller{{User: "ann", Password: "secret"}, {User: "ann", Password: "secret"}},
			[]Caller{{}, {User: "ann"}, {User: "ann", Password: "Secret"}, {User: "bob", Password: "secret"}},
		},
		"all conditions": {
			config.Peer{CIDR: "10.0.0.1", TokenFile: tokens},
			[]Caller{{Address: at("10.0.0.1"), Token: "first"}},
			[]Caller{{Address: at("10.0.0.1")}, {Address: at("10.0.0.2"), Token: "first"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := policy(t, config.Listener{Allow: []config.Allow{{Peer: c.peer}}})
			for _, caller := range c.yes {
				if checked(t, p, caller) != Operate {
					t.Errorf("%s is refused", caller.String())
				}
			}
			for _, caller := range c.no {
				if checked(t, p, caller) != None {
					t.Errorf("%s is allowed", caller.String())
				}
			}
		})
	}
	both := policy(t, config.Listener{Allow: []config.Allow{
		{Peer: config.Peer{TokenFile: tokens}, Role: config.RoleOperate}, {Peer: config.Peer{CIDR: "10.0.0.0/8"}, Role: config.RoleRead},
	}})
	caller := Caller{Address: at("10.0.0.1")}
	if got := both.Check(caller); got != Read {
		t.Errorf("role %v, want read", got)
	}
	caller.Token = "first"
	if got := both.Check(caller); got != Operate {
		t.Errorf("role %v, want operate: the best rule counts", got)
	}
}

// Without rules everyone reads and nobody operates, but by a Unix socket, whose
// permissions say who reaches it.
func TestRoleWithoutRules(t *testing.T) {
	for address, want := range map[string]Role{"127.0.0.1:1": Read, ":1": Read, "unix:/run/isthmus/admin.sock": Operate} {
		if got := policy(t, config.Listener{Address: address}).Check(Caller{Address: netip.MustParseAddr("127.0.0.1")}); got != want {
			t.Errorf("%s: role %v, want %v", address, got, want)
		}
	}
}

func TestFiles(t *testing.T) {
	for name, c := range map[string]struct {
		listener config.Listener
		want     string
	}{
		"no certificate": {config.Listener{TLS: config.ListenerTLS{CertFile: "/nowhere", KeyFile: "/nowhere"}}, "tls.cert_file: open /nowhere"},
		"no tokens":      {config.Listener{Allow: []config.Allow{{Peer: config.Peer{TokenFile: write(t, "tokens", "# none\n")}}}}, "allow[0].peer.token_file: "},
		"no bcrypt":      {config.Listener{Allow: []config.Allow{{Peer: config.Peer{PasswordFile: write(t, "users", "ann:{SHA}x")}}}}, "line 1: must be USER:HASH"},
	} {
		if _, err := New(c.listener); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

// Whoever no rule fits sees nothing, also if a rule fitted a moment ago: what a
// stream may see and whether it is let in is decided by one rule.
func TestAdmit(t *testing.T) {
	tokens := write(t, "tokens", "first\n")
	part := config.View{Namespaces: []string{"a"}}
	p := policy(t, config.Listener{Allow: []config.Allow{{Peer: config.Peer{TokenFile: tokens}, View: part}}})
	if a, ok := p.admit(Caller{Token: "first"}); !ok || !reflect.DeepEqual(a.views, []config.View{part}) || a.identity != "token a7937b64" || !a.credential {
		t.Errorf("a caller with a rule: %+v %v", a, ok)
	}
	if a, ok := p.admit(Caller{Token: "second"}); ok {
		t.Errorf("a caller without a rule is let in, and sees %+v", a)
	}
	open := policy(t, config.Listener{View: part})
	if a, ok := open.admit(Caller{}); !ok || !reflect.DeepEqual(a.views, []config.View{part}) || a.identity != "" || a.credential {
		t.Errorf("a listener without rules: %+v %v", a, ok)
	}
}

// A new rule holds for open streams, too.
func TestChangedRules(t *testing.T) {
	tokens := write(t, "tokens", "first\nsecond\n")
	byToken := config.Listener{Allow: []config.Allow{{Peer: config.Peer{TokenFile: tokens}}}}
	g, _, log := newGate(t, byToken)
	address := serve(t, g)
	if _, err := open(t, address, insecure.NewCredentials(), ""); status.Code(err) != codes.Unauthenticated {
		t.Errorf("without a token: %v, want Unauthenticated", err)
	}
	if _, err := open(t, address, insecure.NewCredentials(), "third"); status.Code(err) != codes.PermissionDenied || strings.Contains(err.Error(), "third") {
		t.Errorf("with another token: %v, want PermissionDenied without the token", err)
	}
	kept, err := open(t, address, insecure.NewCredentials(), "first")
	if err != nil {
		t.Fatal(err)
	}
	gone, err := open(t, address, insecure.NewCredentials(), "second")
	if err != nil {
		t.Fatal(err)
	}
	write(t, tokens, "first\n")
	g.Set(policy(t, byToken))
	if err := gone.RecvMsg(new(emptypb.Empty)); status.Code(err) != codes.PermissionDenied {
		t.Errorf("the stream that is not allowed any longer: %v, want PermissionDenied", err)
	}
	if err := echo(kept); err != nil {
		t.Errorf("the stream that is allowed: %v", err)
	}
	if got := refused(g, reasonRule); got != 3 {
		t.Errorf("%v refusals are counted, want 3", got)
	}
	if strings.Contains(log.String(), "third") || strings.Count(log.String(), "a peer was refused") != 1 {
		t.Errorf("want one line without a token: %s", log)
	}

	server := testcert.New(t, "bridge")
	g.Set(policy(t, config.Listener{TLS: config.ListenerTLS{CertFile: server.Cert, KeyFile: server.Key}}))
	if err := kept.RecvMsg(new(emptypb.Empty)); status.Code(err) != codes.Unauthenticated {
		t.Errorf("a plaintext stream after TLS was configured: %v, want Unauthenticated", err)
	}
	if _, err := open(t, address, dialTLS(t, server, nil, "bridge"), ""); err != nil {
		t.Errorf("TLS after it was configured: %v", err)
	}
}

func TestHandler(t *testing.T) {
	tokens := write(t, "tokens", "reader\n")
	g, _, _ := newGate(t, config.Listener{Allow: []config.Allow{{Peer: config.Peer{TokenFile: tokens}, Role: config.RoleRead}}})
	var role Role
	h := g.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { role, _ = RoleOf(r.Context()) }), func(path string) bool { return path == "/healthz" })
	call := func(path, authorization string) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodGet, "http://127.0.0.1"+path, http.NoBody)
		if authorization != "" {
			req.Header.Set("Authorization", authorization)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, req)
		return w
	}
	if w := call("/", ""); w.Code != http.StatusUnauthorized || w.Body.String() != "unauthorized\n" || w.Header().Get("WWW-Authenticate") != "Bearer" {
		t.Errorf("without a token: %d %s %v", w.Code, w.Body, w.Header())
	}
	for _, header := range []string{"Bearer x", "bearer", "Basic cmVhZGVyOg==", "reader"} {
		if w := call("/", header); w.Code != http.StatusUnauthorized {
			t.Errorf("%q: %d", header, w.Code)
		}
	}
	if w := call("/healthz", ""); w.Code != http.StatusOK {
		t.Errorf("the open path: %d", w.Code)
	}
	if w := call("/", "Bearer reader"); w.Code != http.StatusOK || role != Read {
		t.Errorf("with a token: %d, role %v", w.Code, role)
	}
}

// FuzzAuthorize reads headers of anyone.
func FuzzAuthorize(f *testing.F) {
	for _, seed := range []string{"", "Bearer", "Bearer a", "basic YTpi", "Basic %", "Basic YQ==", "bearer  a b"} {
		f.Add(seed)
	}
	p, err := New(config.Listener{Allow: []config.Allow{{Peer: config.Peer{CIDR: "10.0.0.1"}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, header string) {
		var c Caller
		c.authorize(header)
		if c.Token != "" && c.User != "" {
			t.Errorf("a token and a user: %+v", c)
		}
		if text := c.String(); c.Token != "" && len(c.Token) > 20 && strings.Contains(text, c.Token) {
			t.Errorf("%q has the token", text)
		}
		if p.Check(c) != None {
			t.Errorf("%+v is allowed", c)
		}
	})
}
