package access

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/crypto/bcrypt"

	"github.com/isthmus-mesh/isthmus/internal/testcert"
	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// writeFile puts content into a file of the test.
func writeFile(t testing.TB, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A token is right if it is a line of the file, and nothing else is: neither a
// comment, nor the empty one, nor a part of a line.
func FuzzTokens(f *testing.F) {
	for _, seed := range [][2]string{{"a\nb\n", "b"}, {"# c\n", "# c"}, {"", ""}, {" x \r\n", "x"}, {"a b", "a"}, {"\x00", "\x00"}} {
		f.Add([]byte(seed[0]), seed[1])
	}
	file := filepath.Join(f.TempDir(), "tokens")
	f.Fuzz(func(t *testing.T, content []byte, token string) {
		writeFile(t, file, content)
		tokens, err := readTokens([]string{file})
		if (err != nil) != (len(tokens) == 0) {
			t.Errorf("%d tokens, %v", len(tokens), err)
		}
		want := false
		for _, line := range strings.Split(string(content), "\n") {
			line = strings.TrimSpace(line)
			want = want || line == token && line != "" && line[0] != '#'
		}
		if got := hasToken(tokens, token); got != want {
			t.Errorf("token %q of %q: %v, want %v", token, content, got, want)
		}
	})
}

// A file of passwords is taken as a whole or refused, and lets in nobody whom
// it does not name.
func FuzzPasswords(f *testing.F) {
	const good = "ann:$2a$04$mdZ8TKLzBBcQDbVrtoB4AOgPwxC.z7JYn6brvuS7XsyDzJ2Kib5M6\n"
	for _, seed := range []string{good, "", ":", "ann", "ann:x", "#\n" + good, good + good, "ann:$2a$99$", "\x00:" + good} {
		f.Add([]byte(seed), "bob", "secret")
	}
	file := filepath.Join(f.TempDir(), "passwords")
	f.Fuzz(func(t *testing.T, content []byte, user, password string) {
		writeFile(t, file, content)
		p, err := readPasswords([]string{file})
		if err != nil {
			return
		}
		if len(p.hashes) == 0 || p.hashes[""] != nil {
			t.Errorf("%q has %d users", content, len(p.hashes))
		}
		// A hash that a fuzzer writes could take hours.
		cost, _ := bcrypt.Cost(p.decoy)
		if _, named := p.hashes[user]; !named && cost <= bcrypt.MinCost && p.has(user, password) {
			t.Errorf("%q lets in %q", content, user)
		}
	})
}

// Rules never let in who does not meet a condition, whatever a certificate or a
// handshake says; a pattern's * stays within a segment.
func FuzzRules(f *testing.F) {
	for _, seed := range [][5]string{
		{"10.0.0.0/8", "spiffe://a/ns/*", "*.example.org", "b*", "spiffe://a/ns/x"},
		{"::/0", "spiffe://[", "*", "\\", "spiffe://a/../b"},
		{"", "spiffe://*/*", "", "?", "spiffe://a.b/x/y?z#w"},
		{"1.2.3.4", "", "[a-", "", "http://u:p@h/%zz"},
		{"fe80::1%eth0", "spiffe://a", "a", "a", "SPIFFE://A/B"},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3], seed[4], "10.1.2.3", "www.example.org", true)
	}
	f.Fuzz(func(t *testing.T, cidr, id, san, sni, uri, address, name string, verified bool) {
		p, err := New(config.Listener{Allow: []config.Allow{{Peer: config.Peer{CIDR: cidr, SPIFFE: id, SAN: san, SNI: sni}}}})
		if err != nil || cidr+id+san+sni == "" {
			return
		}
		addr, _ := netip.ParseAddr(address)
		state := &tls.ConnectionState{ServerName: name, PeerCertificates: []*x509.Certificate{{DNSNames: []string{name}}}}
		if u, err := url.Parse(uri); err == nil {
			state.PeerCertificates[0].URIs = []*url.URL{u}
		}
		if verified {
			state.VerifiedChains = [][]*x509.Certificate{state.PeerCertificates}
		}
		c := Caller{Address: addr, TLS: state}
		got, who := p.Check(c) != None, c.String()
		if got && !verified && id+san != "" {
			t.Errorf("a certificate that was not verified gets in: %s", who)
		}
		if got && id != "" && strings.Count(c.spiffe(), "/") != strings.Count(id, "/") {
			t.Errorf("%q fits %q", c.spiffe(), id)
		}
		if spiffe := c.spiffe(); spiffe != "" {
			trust, rest, found := strings.Cut(strings.TrimPrefix(spiffe, "spiffe://"), "/")
			bad := func(segment string) bool { return segment == "" || segment == "." || segment == ".." }
			if !strings.HasPrefix(spiffe, "spiffe://") || trust == "" || found && slices.ContainsFunc(strings.Split(rest, "/"), bad) {
				t.Errorf("%q is taken for a SPIFFE ID", spiffe)
			}
		}
		if got && cidr != "" && !addr.IsValid() {
			t.Errorf("a caller without an address fits %q", cidr)
		}
		if p.Check(Caller{}) != None {
			t.Error("one of whom nothing is known gets in")
		}
	})
}

// The TLS files of a listener are used as a whole or refused with the field.
func FuzzTLSFiles(f *testing.F) {
	cert := testcert.New(f, "localhost")
	contents := map[string][]byte{}
	for _, file := range []string{cert.Cert, cert.Key} {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		contents[file] = b
	}
	dir := f.TempDir()
	c := config.ListenerTLS{CertFile: filepath.Join(dir, "cert"), KeyFile: filepath.Join(dir, "key"), ClientCAFile: filepath.Join(dir, "ca"), ClientAuth: config.ClientAuthRequire}
	for which, seed := range []string{"", "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n", "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n", "-----BEGIN X-----\na: b\n\n"} {
		f.Add([]byte(seed), which)
	}
	f.Fuzz(func(t *testing.T, content []byte, which int) {
		// One of the files is not what it should be.
		for i, path := range []string{c.CertFile, c.KeyFile, c.ClientCAFile} {
			b := contents[[]string{cert.Cert, cert.Key, cert.Cert}[i]]
			if uint(which)%3 == uint(i) {
				b = content
			}
			writeFile(t, path, b)
		}
		files, err := newFiles(c)
		if (err == nil) != (files != nil) {
			t.Fatalf("%v, %v", files, err)
		}
		if err != nil {
			return
		}
		if out := files.get(); out.MinVersion < tls.VersionTLS12 || out.ClientAuth != tls.RequireAndVerifyClientCert || out.ClientCAs == nil || !out.SessionTicketsDisabled {
			t.Errorf("TLS is not what the block says: %+v", out)
		}
	})
}

// Whatever the first bytes of a connection are, a TLS listener takes nobody
// without a certificate for one who has it: plaintext stays plaintext, which no
// stream of it is served with.
func FuzzFirstBytes(f *testing.F) {
	cert := testcert.New(f, "localhost")
	gate := func(l config.Listener) *Gate {
		p, err := New(l)
		if err != nil {
			f.Fatal(err)
		}
		return NewGate(stream.NewServer(nil).Listener("listen.xds"), p, NewMetrics(prometheus.NewRegistry()), nil, slog.New(slog.DiscardHandler))
	}
	sealed := gate(config.Listener{TLS: config.ListenerTLS{CertFile: cert.Cert, KeyFile: cert.Key, ClientCAFile: cert.Cert, ClientAuth: config.ClientAuthRequire}})
	open := gate(config.Listener{})
	for _, seed := range []string{"", "P", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x16\x03\x01\x00\x05hello", "\x16\x03\x03\xff\xff", "\x80\x2e\x01\x03\x01", "\x15\x03\x01\x00\x02\x02\x28", "GET / HTTP/1.1\r\n\r\n"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, first []byte) {
		for _, g := range []*Gate{sealed, open} {
			client, server := net.Pipe()
			done := make(chan struct{})
			go func() { // reads what the server says
				defer close(done)
				b := make([]byte, 1<<10)
				for {
					if _, err := client.Read(b); err != nil {
						return
					}
				}
			}()
			go func() {
				if len(first) > 0 { // an empty one would be read
					_, _ = client.Write(first)
				}
				client.Close()
			}()
			conn, info, err := g.Credentials().ServerHandshake(server)
			if err == nil && (info.AuthType() != plaintext{}.AuthType() || len(first) == 0 || first[0] == tlsRecord) {
				t.Errorf("%q is %s", first, info.AuthType())
			}
			if conn != nil {
				conn.Close()
			}
			server.Close()
			<-done
		}
	})
}
