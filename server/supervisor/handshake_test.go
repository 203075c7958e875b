package supervisor_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

// stepPrefix begins the roles of plugins that fail at one step of the
// handshake.
const stepPrefix = "step-"

// stepMain is a plugin that does a handshake of its own, without go-plugin, and
// stops at the step that its role names.
func stepMain(role string) {
	say := func(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }
	switch role {
	case "step-curve": // tells which curve the certificate that it is given is on
		block, _ := pem.Decode([]byte(os.Getenv("PLUGIN_CLIENT_CERT")))
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			panic(err)
		}
		fmt.Fprintln(os.Stderr, "the curve is", cert.PublicKey.(*ecdsa.PublicKey).Params().Name)
		os.Exit(1)
	case "step-exits":
		fmt.Fprintln(os.Stderr, "cannot go on")
		os.Exit(3)
	case "step-half-line":
		fmt.Fprint(os.Stdout, "half a line")
		os.Exit(4)
	case "step-closes-stdout":
		_ = os.Stdout.Close()
		select {}
	case "step-wrong-line":
		say("usage: rogue [-h] \x00\xff%s", strings.Repeat("x", 1000))
		select {}
	case "step-version":
		say("1|2|unix|/nowhere|grpc|AAAA")
		select {}
	case "step-netrpc":
		say("1|1|unix|/nowhere|netrpc|")
		select {}
	case "step-no-certificate":
		say("1|1|unix|/nowhere|grpc")
		select {}
	case "step-bad-certificate":
		say("1|1|unix|/nowhere|grpc|%s", strings.Repeat("A", 200))
		select {}
	}

	cert, encoded := stepCertificate()
	socket := filepath.Join(os.Getenv("PLUGIN_UNIX_SOCKET_DIR"), "s")
	if role == "step-no-socket" {
		say("1|1|unix|%s|grpc|%s", socket, encoded)
		select {}
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		panic(err)
	}
	config := &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12}
	switch role {
	case "step-other-certificate":
		other, _ := stepCertificate()
		config.Certificates = []tls.Certificate{other}
	case "step-refuses", "step-refuses-1.2":
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, x509.NewCertPool()
		if role == "step-refuses-1.2" {
			config.MaxVersion = tls.VersionTLS12
		}
	}
	say("1|1|unix|%s|grpc|%s", socket, encoded)
	for {
		conn, err := l.Accept()
		if err != nil {
			panic(err)
		}
		switch role {
		case "step-silent": // answers nothing
			continue
		case "step-plain":
			_, _ = bufio.NewReader(conn).Peek(1)
			_, _ = conn.Write([]byte("I do not speak TLS"))
		case "step-hangs-up":
		case "step-no-http2":
			secure := tls.Server(conn, config)
			_, _ = secure.Write([]byte("I do not speak HTTP/2, but much else of no interest"))
			_, _ = bufio.NewReader(secure).ReadString('\x00')
		default:
			_ = tls.Server(conn, config).Handshake()
		}
		_ = conn.Close()
	}
}

func stepCertificate() (tls.Certificate, string) {
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		DNSNames: []string{"localhost"}, SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	if err != nil {
		panic(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, base64.RawStdEncoding.EncodeToString(der)
}

// When the bridge gives a plugin up before it serves, the error says at which
// step, with what the plugin had to say.
func TestHandshakeSteps(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]struct {
		is    error
		texts []string
	}{
		"step-curve":             {supervisor.ErrExited, []string{"the curve is P-256"}},
		"step-exits":             {supervisor.ErrExited, []string{"start ", "exit status 3; its last words: cannot go on", "before its handshake"}},
		"step-half-line":         {supervisor.ErrExited, []string{"exit status 4; its last words: half a line", "before its handshake"}},
		"step-closes-stdout":     {nil, []string{"start ", "closed its standard output before its handshake"}},
		"step-wrong-line":        {nil, []string{"start ", `"usage: rogue [-h] \x00\xffxxx`, `xxx...", is not a handshake`, "is this an adapter, and built for this machine?"}},
		"step-version":           {supervisor.ErrContract, []string{"start ", `"1|2|unix|/nowhere|grpc|AAAA"`, `another version of the contract: "2", must be 1`}},
		"step-netrpc":            {nil, []string{"start ", `the protocol is "netrpc", must be grpc`}},
		"step-no-certificate":    {nil, []string{"start ", "it has no certificate"}},
		"step-bad-certificate":   {nil, []string{"start ", "the certificate: x509: "}},
		"step-no-socket":         {os.ErrNotExist, []string{"connect to ", "its socket cannot be reached: dial unix "}},
		"step-silent":            {supervisor.ErrHung, []string{"connect to ", "no TLS or no HTTP/2 on its socket within 4s"}},
		"step-plain":             {nil, []string{"connect to ", "TLS: tls: first record does not look like a TLS handshake"}},
		"step-hangs-up":          {nil, []string{"connect to ", "TLS: the plugin closed the connection"}},
		"step-other-certificate": {nil, []string{"connect to ", "TLS: the plugin's certificate is not the one of its handshake: tls: failed to verify certificate: x509: "}},
		"step-refuses":           {nil, []string{"connect to ", "TLS: the plugin refuses the bridge, maybe its certificate: remote error: tls: "}},
		"step-refuses-1.2":       {nil, []string{"connect to ", "TLS: the plugin refuses the bridge, maybe its certificate: remote error: tls: "}},
		"step-no-http2":          {nil, []string{"connect to ", "HTTP/2: "}},
		"describe-fails":         {nil, []string{"describe: no idea who I am"}},
		"configure-fails":        {nil, []string{"configure: no room for it"}},
	} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			if h.Hurry(); errors.Is(want.is, supervisor.ErrHung) {
				h.HurryHung()
			}
			_, _, err := supervisor.Check(t.Context(), h, spec(role, struct{}{}), slog.New(slog.DiscardHandler))
			if err == nil {
				t.Fatal("no error")
			}
			if want.is != nil && !errors.Is(err, want.is) {
				t.Errorf("error %v, want one that is %v", err, want.is)
			}
			for _, text := range want.texts {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("error %v, want %q in it", err, text)
				}
			}
			if text := err.Error(); strings.Contains(text, "broken pipe") || len(text) > 1000 {
				t.Errorf("error of %d bytes: %.1000s", len(text), text)
			}
		})
	}
}

// A process that cannot be started says so, whatever the reason.
func TestNotStarted(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	dir := t.TempDir()
	write := func(name string, mode os.FileMode, content string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "missing"):                     "no such file or directory",
		write("mode", 0o600, "#!/bin/sh\n"):               "permission denied",
		write("format", 0o700, "no program\n"):            "exec format error",
		write("interpreter", 0o700, "#!/nowhere/to/be\n"): "no such file or directory",
	} {
		sp := spec("remote", nil)
		sp.Command = []string{path}
		_, err := supervisor.Describe(t.Context(), h, sp, slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), "start "+path+": ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %q", filepath.Base(path), err, want)
		}
	}
}

// Whoever waits for a plugin may give up at any step; the process is gone then.
func TestGiveUp(t *testing.T) {
	t.Parallel()
	for _, role := range []string{"silent", "step-silent", "hang-describe", "hang-configure"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			sup, err := supervisor.New(h, spec(role, struct{}{}), newSink(), slog.New(slog.DiscardHandler), nil)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- sup.Prepare(ctx) }() // ends with cancel
			pid := 0
			eventually(t, "the process", func() bool { pid = sup.Status().PID; return pid != 0 })
			cancel()
			if err := wait(t, "end of Prepare", done); err == nil {
				t.Error("no error")
			}
			if testwait.Running(pid) {
				t.Error("the plugin is still there")
			}
			sup.Close()
		})
	}
}
