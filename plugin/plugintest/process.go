package plugintest

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// process is a plugin that is started without go-plugin's client, so that what that hides can be looked at: the output, the
// connection, the end.
type process struct {
	cmd    *exec.Cmd
	dir    string
	stdout *os.File
	conn   *grpc.ClientConn
	api    pluginv1.AdapterServiceClient
	exited chan struct{}
	err    error // how it ended; set before exited is closed

	output sync.WaitGroup
	mu     sync.Mutex
	extra  []byte // what came on standard output after the handshake; guarded by mu
	stderr []byte // the beginning of standard error; guarded by mu
}

const (
	// startWithin is how long a plugin may take to say its handshake.
	startWithin = 10 * time.Second
	// endWithin is how long a plugin may take to end.
	endWithin = 10 * time.Second
	// maxOutput is how much of a plugin's output is kept, in bytes.
	maxOutput = 64 << 10
)

// launch starts the plugin with the environment of a host, or without the cookie: as if by hand.
func launch(cfg Config, env ...string) (*process, *bufio.Reader, error) {
	dir, err := os.MkdirTemp("/tmp", "isthmus-test")
	if err != nil {
		return nil, nil, err
	}
	p := &process{dir: dir, exited: make(chan struct{})}
	p.cmd = exec.Command(cfg.Command[0], cfg.Command[1:]...) //nolint:gosec,noctx // the test's author names it; stop ends it
	p.cmd.Env = append(append(os.Environ(), cfg.Env...), env...)
	p.cmd.Env = append(p.cmd.Env, "PLUGIN_UNIX_SOCKET_DIR="+dir)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, out, err := os.Pipe()
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	stderr, errOut, err := os.Pipe()
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	p.cmd.Stdout, p.cmd.Stderr = out, errOut
	err = p.cmd.Start()
	_, _ = out.Close(), errOut.Close()
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	lines := bufio.NewReader(stdout)
	// Both end with the process; stop waits for them.
	p.output.Go(func() {
		defer stderr.Close()
		_, _ = io.Copy(writer(func(b []byte) {
			p.stderr = append(p.stderr, b[:min(len(b), maxOutput-min(maxOutput, len(p.stderr)))]...)
		}, &p.mu), stderr)
	})
	p.output.Go(func() {
		err := p.cmd.Wait()
		p.err = err
		close(p.exited)
	})
	p.output.Go(func() {
		<-p.exited
		deadline := time.Now().Add(time.Second)
		_, _ = stdout.SetReadDeadline(deadline), stderr.SetReadDeadline(deadline)
	})
	p.stdout = stdout
	return p, lines, nil
}

// writerFunc is an io.Writer.
type writerFunc func(b []byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func writer(f func(b []byte), mu *sync.Mutex) io.Writer {
	return writerFunc(func(b []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		f(b)
		return len(b), nil
	})
}

// start starts the plugin and connects to it, as a host does.
func start(ctx context.Context, cfg Config) (*process, error) {
	cert, certPEM, err := newCertificate()
	if err != nil {
		return nil, err
	}
	p, lines, err := launch(cfg,
		wire.CookieKey+"="+wire.CookieValue,
		fmt.Sprintf("PLUGIN_PROTOCOL_VERSIONS=%d", wire.ProtocolVersion),
		"PLUGIN_MIN_PORT=10000", "PLUGIN_MAX_PORT=25000",
		"PLUGIN_CLIENT_CERT="+string(certPEM),
		wire.LogLevelKey+"=debug",
	)
	if err != nil {
		return nil, err
	}
	late := time.AfterFunc(startWithin, func() { _ = p.stdout.SetReadDeadline(time.Now()) })
	cancelled := context.AfterFunc(ctx, func() { _ = p.stdout.SetReadDeadline(time.Now()) })
	line, err := lines.ReadString('\n')
	late.Stop()
	cancelled()
	// Ends with the process; stop waits for it.
	p.output.Go(func() {
		_, _ = io.Copy(writer(func(b []byte) { p.extra = append(p.extra, b[:min(len(b), maxOutput-min(maxOutput, len(p.extra)))]...) }, &p.mu), lines)
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("no handshake on standard output within %v: %w; standard error: %s", startWithin, err, p.errors()), p.stop())
	}
	if err := p.connect(line, cert); err != nil {
		return nil, errors.Join(fmt.Errorf("handshake %q: %w", line, err), p.stop())
	}
	return p, nil
}

// connect follows the handshake: core version, contract version, network, address, protocol, certificate.
func (p *process) connect(line string, cert tls.Certificate) error {
	parts := strings.Split(strings.TrimSpace(line), "|")
	if len(parts) < 6 {
		return errors.New(`must be "1|VERSION|NETWORK|ADDRESS|grpc|CERTIFICATE"`)
	}
	if parts[0] != "1" {
		return fmt.Errorf("go-plugin's version is %q, must be 1", parts[0])
	}
	if parts[1] != fmt.Sprint(wire.ProtocolVersion) {
		return fmt.Errorf("the contract's version is %q, must be %d", parts[1], wire.ProtocolVersion)
	}
	if parts[4] != "grpc" {
		return fmt.Errorf("the protocol is %q, must be grpc", parts[4])
	}
	der, err := base64.RawStdEncoding.DecodeString(parts[5])
	if err != nil {
		return fmt.Errorf("the certificate must be base64 without padding: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return fmt.Errorf("the certificate: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(leaf)
	p.conn, err = grpc.NewClient("passthrough:plugin",
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, parts[2], parts[3])
		}),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{
			Certificates: []tls.Certificate{cert},
			RootCAs:      roots,
			ServerName:   "localhost",
			MinVersion:   tls.VersionTLS12,
		})),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(wire.MaxMessage)),
	)
	if err != nil {
		return err
	}
	p.api = pluginv1.NewAdapterServiceClient(p.conn)
	return nil
}

// hangUp ends the connection, as the end of a host does.
func (p *process) hangUp() error {
	if p.conn == nil {
		return nil
	}
	err := p.conn.Close()
	p.conn = nil
	return err
}

// awaitEnd waits for the process to end on its own.
func (p *process) awaitEnd(after string) error {
	timer := time.NewTimer(endWithin)
	defer timer.Stop()
	select {
	case <-p.exited:
		return nil
	case <-timer.C:
		return fmt.Errorf("the process still runs %v after %s", endWithin, after)
	}
}

// stop ends the process and releases everything.
func (p *process) stop() error {
	err := p.hangUp()
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	<-p.exited
	p.output.Wait()
	return errors.Join(err, os.RemoveAll(p.dir))
}

// stray returns what came on standard output besides the handshake.
func (p *process) stray() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.extra)
}

// errors returns the beginning of standard error.
func (p *process) errors() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(bytes.TrimSpace(p.stderr[:min(len(p.stderr), 1000)]))
}

// newCertificate makes a certificate for one connection.
func newCertificate() (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "localhost", Organization: []string{"isthmus"}},
		DNSNames:              []string{"localhost"},
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageKeyEncipherment | x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		SerialNumber:          big.NewInt(1),
		NotBefore:             time.Now().Add(-time.Minute),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}
