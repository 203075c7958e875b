package access

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/netip"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
)

// openOn is open on a connection.
func openOn(t *testing.T, conn *grpc.ClientConn, token string) (grpc.ClientStream, error) {
	t.Helper()
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

func dial(t *testing.T, address string, creds credentials.TransportCredentials) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// A token that is gone admits nobody, whatever is left of the file: neither new
// streams, nor streams on old connections, nor open ones. Those that another
// rule lets in go on.
func TestTokenRevoked(t *testing.T) {
	for name, revoke := range map[string]func(t *testing.T, file string){
		"emptied":       func(t *testing.T, file string) { write(t, file, "") },
		"comments only": func(t *testing.T, file string) { write(t, file, "# first\n\n") },
		"deleted": func(t *testing.T, file string) {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		},
		"replaced": func(t *testing.T, file string) { write(t, file, "another\n") },
	} {
		t.Run(name, func(t *testing.T) {
			file, kept := write(t, "tokens", "first\n"), write(t, "kept", "second\n")
			g, _, log := newGate(t, config.Listener{Allow: []config.Allow{{Peer: config.Peer{TokenFile: file}}, {Peer: config.Peer{TokenFile: kept}}}})
			conn := dial(t, serve(t, g), insecure.NewCredentials())
			first, err := openOn(t, conn, "first")
			if err != nil {
				t.Fatal(err)
			}
			second, err := openOn(t, conn, "second")
			if err != nil {
				t.Fatal(err)
			}
			revoke(t, file)
			if _, err := openOn(t, conn, "first"); status.Code(err) != codes.PermissionDenied {
				t.Errorf("a new stream: %v", err)
			}
			if _, err := openOn(t, conn, ""); status.Code(err) != codes.Unauthenticated {
				t.Errorf("without a token: %v", err)
			}
			g.recheck(time.Now())
			if err := first.RecvMsg(new(emptypb.Empty)); status.Code(err) != codes.PermissionDenied {
				t.Errorf("the open stream: %v", err)
			}
			if err := echo(second); err != nil {
				t.Errorf("a stream with another token: %v", err)
			}
			if name != "replaced" && !strings.Contains(log.String(), "files of a listener") {
				t.Errorf("the log does not say it: %s", log)
			}
			write(t, file, "first\n")
			if _, err := openOn(t, conn, "first"); err != nil {
				t.Errorf("with the token again: %v", err)
			}
		})
	}
}

// revocations writes a list of what a certificate's owner revoked.
func revocations(t *testing.T, by *testcert.Certificate, file string, serials ...*big.Int) {
	t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour), NextUpdate: time.Now().Add(time.Hour)}
	for _, s := range serials {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: s, RevocationTime: time.Now()})
	}
	leaf, key := by.Signer()
	der, err := x509.CreateRevocationList(rand.Reader, list, leaf, key)
	if err != nil {
		t.Fatal(err)
	}
	write(t, file, string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})))
}

// A certificate that is revoked, whose authority is removed, or that ends, ends
// what it let in: open streams, new ones on the old connection, and then the
// connection. One of the same authority that is still right goes on.
func TestCertificateRevoked(t *testing.T) {
	ca := testcert.New(t, "authority", func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign })
	other, server := testcert.New(t, "other"), testcert.New(t, "bridge")
	text := func(c *testcert.Certificate) string {
		b, err := os.ReadFile(c.Cert)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for name, c := range map[string]struct {
		lasts  time.Duration
		revoke func(t *testing.T, authorities, list string, serial *big.Int)
		spares bool // another certificate of the authority
	}{
		"authority replaced": {time.Hour, func(t *testing.T, authorities, _ string, _ *big.Int) { write(t, authorities, text(other)) }, false},
		"authority emptied":  {time.Hour, func(t *testing.T, authorities, _ string, _ *big.Int) { write(t, authorities, "") }, false},
		"authority deleted": {time.Hour, func(t *testing.T, authorities, _ string, _ *big.Int) {
			if err := os.Remove(authorities); err != nil {
				t.Fatal(err)
			}
		}, false},
		"listed": {time.Hour, func(t *testing.T, _, list string, serial *big.Int) { revocations(t, ca, list, serial) }, true},
		"over":   {2 * time.Second, func(*testing.T, string, string, *big.Int) {}, true},
	} {
		t.Run(name, func(t *testing.T) {
			authorities, list := write(t, "ca.pem", text(ca)), write(t, "crl.pem", "")
			revocations(t, ca, list)
			g, _, _ := newGate(t, config.Listener{TLS: config.ListenerTLS{
				CertFile: server.Cert, KeyFile: server.Key, ClientCAFile: authorities, ClientCRLFile: list, ClientAuth: config.ClientAuthRequire,
			}})
			address := serve(t, g)
			client, fine := ca.Issue(t, "client", func(x *x509.Certificate) { x.NotAfter = time.Now().Add(c.lasts) }), ca.Issue(t, "fine")
			leaf, _ := client.Signer()
			conn, good := dial(t, address, dialTLS(t, server, client, "bridge")), dial(t, address, dialTLS(t, server, fine, "bridge"))
			first, err := openOn(t, conn, "")
			if err != nil {
				t.Fatal(err)
			}
			spared, err := openOn(t, good, "")
			if err != nil {
				t.Fatal(err)
			}
			c.revoke(t, authorities, list, leaf.SerialNumber)
			ended := make(chan error, 1)
			go func() { ended <- first.RecvMsg(new(emptypb.Empty)) }() // ends with the stream
			testwait.Eventually(t, patience, "the stream to end", func() (string, bool) {
				g.recheck(time.Now())
				select {
				case err = <-ended:
					return "", true
				default:
					return "it goes on", false
				}
			})
			// The connection may end before the status has been read.
			if code := status.Code(err); code != codes.PermissionDenied && code != codes.Unavailable {
				t.Errorf("the open stream: %v", err)
			}
			if _, err := openOn(t, conn, ""); err == nil {
				t.Error("a new stream on the old connection is let in")
			}
			if _, err := open(t, address, dialTLS(t, server, client, "bridge"), ""); err == nil {
				t.Error("a new connection is let in")
			}
			g.recheck(time.Now())
			if n := g.open(); c.spares && n != 1 {
				t.Errorf("%d connections with certificates are open, want that of the other client", n)
			}
			if err := echo(spared); (err == nil) != c.spares {
				t.Errorf("the other client: %v", err)
			}
		})
	}
}

// open returns the number of connections with certificates.
func (g *Gate) open() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.conns)
}

// What a credential admitted has a greatest age, at which the client comes back
// with its credential. A stream that no credential let in, such as istiod's,
// has none.
func TestMaxAge(t *testing.T) {
	tokens := write(t, "tokens", "first\n")
	g, _, _ := newGate(t, config.Listener{
		MaxAge: config.Duration(time.Minute),
		Allow:  []config.Allow{{Peer: config.Peer{TokenFile: tokens}}, {Peer: config.Peer{CIDR: "127.0.0.1"}}},
	})
	conn := dial(t, serve(t, g), insecure.NewCredentials())
	tool, err := openOn(t, conn, "first")
	if err != nil {
		t.Fatal(err)
	}
	istiod, err := openOn(t, conn, "")
	if err != nil {
		t.Fatal(err)
	}
	g.recheck(time.Now().Add(47 * time.Second))
	if err := echo(tool); err != nil {
		t.Errorf("before its age: %v", err)
	}
	g.recheck(time.Now().Add(61 * time.Second))
	if err := tool.RecvMsg(new(emptypb.Empty)); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "max_age") {
		t.Errorf("at its age: %v", err)
	}
	g.recheck(time.Now().Add(1000 * time.Hour))
	if err := echo(istiod); err != nil {
		t.Errorf("a stream without a credential: %v", err)
	}
	if _, err := openOn(t, conn, "first"); err != nil {
		t.Errorf("the tool comes back: %v", err)
	}
}

// A connection with a certificate ends at its age, with what is open on it.
func TestMaxAgeOfConnection(t *testing.T) {
	ca, server := testcert.New(t, "client"), testcert.New(t, "bridge")
	g, _, _ := newGate(t, config.Listener{
		MaxAge: config.Duration(time.Minute),
		TLS:    config.ListenerTLS{CertFile: server.Cert, KeyFile: server.Key, ClientCAFile: ca.Cert, ClientAuth: config.ClientAuthRequire},
	})
	conn := dial(t, serve(t, g), dialTLS(t, server, ca, "bridge"))
	s, err := openOn(t, conn, "")
	if err != nil {
		t.Fatal(err)
	}
	later := time.Now().Add(61 * time.Second)
	g.recheck(later)
	if err := s.RecvMsg(new(emptypb.Empty)); status.Code(err) != codes.Unavailable {
		t.Errorf("at its age: %v", err)
	}
	g.recheck(later)
	if n := g.open(); n != 0 {
		t.Errorf("%d connections are open", n)
	}
	testwait.Eventually(t, patience, "the client to come back", func() (string, bool) { // it may use the old connection once more
		_, err := openOn(t, conn, "")
		return fmt.Sprint(err), err == nil
	})
}

// A list of revoked certificates is one of an authority that is trusted.
func TestRevocationListRefused(t *testing.T) {
	ca := testcert.New(t, "authority", func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign })
	other := testcert.New(t, "other", func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCRLSign })
	list := write(t, "crl.pem", "")
	block := config.ListenerTLS{CertFile: ca.Cert, KeyFile: ca.Key, ClientCAFile: ca.Cert, ClientCRLFile: list, ClientAuth: config.ClientAuthRequire}
	for want, prepare := range map[string]func(){
		"holds no PEM list":   func() { write(t, list, "x") },
		"no authority of":     func() { revocations(t, other, list) },
		"tls.client_crl_file": func() { _ = os.Remove(list) },
	} {
		prepare()
		if _, err := newFiles(block); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "client_crl_file") {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// Passwords are checked one at a time, and those of an address in turn: who
// guesses waits for himself. Names that there are take as many hashes as
// others, and a password that was right takes none.
func TestLogins(t *testing.T) {
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	users := write(t, "users", "ann:"+string(hash)+"\n")
	good := netip.MustParseAddr("10.0.0.2")
	synctest.Test(t, func(t *testing.T) {
		p := policy(t, config.Listener{Allow: []config.Allow{{Peer: config.Peer{PasswordFile: users}, Role: config.RoleOperate}}})
		turns := newLogins()
		login := func(from netip.Addr, user, password string) (Role, error) {
			c := Caller{Address: from, User: user, Password: password}
			err := p.login(t.Context(), turns, from, &c)
			return p.Check(c), err
		}
		if role, err := login(good, "ann", "secret"); role != Operate || err != nil {
			t.Errorf("the right password: %v, %v", role, err)
		}
		pass, err := turns.Enter(t.Context(), Network(good).String())
		if err != nil {
			t.Fatal(err)
		}
		// One who guesses, from any address of his network.
		results := make(chan error, 100)
		for i := range 100 {
			go func() {
				_, err := login(netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 15: byte(i)}), []string{"ann", "bob"}[i%2], "guess")
				results <- err
			}()
		}
		synctest.Wait()
		for range 100 - loginsWaiting - 1 {
			if err := <-results; err != errLogins { //nolint:errorlint // as it is
				t.Errorf("one guess too many: %v", err)
			}
		}
		if role, err := login(good, "ann", "secret"); role != Operate || err != nil {
			t.Errorf("a password that was right before, while others are checked: %v, %v", role, err)
		}
		second := make(chan Role, 1)
		go func() {
			role, _ := login(netip.MustParseAddr("10.0.0.3"), "ann", "secret2")
			second <- role
		}()
		synctest.Wait()
		pass.Leave()
		// The one of another address waits for one guess at most.
		if role := <-second; role != None {
			t.Errorf("a wrong password: %v", role)
		}
		if n := len(results); n > 2 {
			t.Errorf("another address waits for %d guesses", n)
		}
		// Who guesses rests longer each time.
		for want := 1; want <= 40; want++ {
			if got := turns.wrong(netip.MustParseAddr("10.0.0.4")); got != min(time.Duration(want)*guessRest, mostRest) {
				t.Errorf("after %d guesses it rests %v", want, got)
			}
		}
		time.Sleep(guessesForgotten + time.Second)
		if got := turns.wrong(netip.MustParseAddr("10.0.0.4")); got != guessRest {
			t.Errorf("later it rests %v", got)
		}
	})

	file, err := readPasswords([]string{users})
	if err != nil {
		t.Fatal(err)
	}
	if string(file.decoy) != string(hash) || file.has("bob", "secret") || file.knows("bob", "secret") {
		t.Error("a name that there is not has the password of one that there is, or takes no hash")
	}
}
