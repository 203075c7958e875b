package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testspire"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/internal/watch"
)

// The bridge has its certificate and its authorities from SPIRE, a sink its
// own, and both are who SPIRE says: a sink with another identity is refused,
// the certificate that SPIRE renews is used, the open stream stays, and without
// the agent the last one is still good.
func TestSPIRE(t *testing.T) {
	testenv.SkipIfShort(t)
	if !testenv.Compat() {
		t.Skip("SPIRE is part of make compat")
	}
	spire := testspire.Start(t)
	program, err := filepath.EvalSymlinks(testisthmus.Binary(t))
	if err != nil {
		t.Fatal(err)
	}
	const lifetime = 40 * time.Second
	spire.Register(t, "isthmus", program, lifetime)
	tool := spire.Register(t, "tool", spire.Client, time.Hour)
	credential := func(cert, key, bundle string) credentials.TransportCredentials {
		t.Helper()
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		pem, err := os.ReadFile(bundle)
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			t.Fatalf("%s has no authority", bundle)
		}
		return credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: "isthmus.example.org", MinVersion: tls.VersionTLS13})
	}
	trusted := credential(spire.Fetch(t))

	consul := testconsul.Start(t, testconsul.Config{})
	consul.Register(t, web(1))
	bridge := testisthmus.StartSecure(t, follow{}.registries(consul.Addr),
		`tls: {workload_api: "`+spire.Socket+`", client_auth: require}, allow: [{peer: {spiffe: "spiffe://example.org/tool"}}]`)
	bridge.WaitReady(t)
	follow := func(creds credentials.TransportCredentials) (out, problems *testwait.Buffer) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		t.Cleanup(func() {
			cancel()
			running.Wait()
		})
		out, problems = &testwait.Buffer{}, &testwait.Buffer{}
		o := watch.Options{Address: bridge.XDS, Output: "json", Body: true, Stderr: problems, DialOptions: []grpc.DialOption{grpc.WithTransportCredentials(creds)}}
		running.Go(func() { // ends with cancel
			if err := watch.Run(ctx, o, out); err != nil {
				t.Error(err)
			}
		})
		return out, problems
	}
	has := func(out *testwait.Buffer, what string) {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, what, func() (string, bool) { return out.String(), strings.Contains(out.String(), what) })
	}
	sink, ended := follow(trusted)
	has(sink, "10.1.0.1")

	// The certificate in use is one, another one, and another one.
	serial := func() string {
		conn, err := tls.Dial("tcp", bridge.XDS, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) //nolint:gosec // to look at it
		if err != nil {
			return ""
		}
		defer conn.Close()
		c := conn.ConnectionState().PeerCertificates[0]
		if len(c.URIs) != 1 || c.URIs[0].String() != "spiffe://example.org/isthmus" {
			t.Errorf("the certificate is for %v", c.URIs)
		}
		return c.SerialNumber.String()
	}
	seen := map[string]bool{}
	testenv.Eventually(t, testenv.Patience, "two renewals by SPIRE to be in use", func() (string, bool) {
		if now := serial(); now != "" {
			seen[now] = true
		}
		return fmt.Sprint(seen), len(seen) == 3
	})
	another, _ := follow(trusted)
	has(another, "10.1.0.1")

	// The same program has another identity from now on.
	spire.Unregister(t, tool)
	spire.Register(t, "other", spire.Client, time.Hour)
	var other credentials.TransportCredentials
	testenv.Eventually(t, testenv.Patience, "the identity to change", func() (string, bool) {
		cert, key, bundle := spire.Fetch(t)
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			return err.Error(), false
		}
		other = credential(cert, key, bundle)
		return "", pair.Leaf.URIs[0].Path == "/other"
	})
	_, refusals := follow(other)
	has(refusals, "spiffe://example.org/other")

	spire.Agent.Kill()
	testenv.Eventually(t, testenv.Patience, "the loss of the agent to be told", func() (string, bool) {
		return bridge.Log(), strings.Contains(bridge.Log(), "those read before stay in use")
	})
	late, _ := follow(trusted)
	has(late, "10.1.0.1")
	consul.Register(t, web(2))
	for _, out := range []*testwait.Buffer{sink, another, late} {
		has(out, "10.1.0.2")
	}
	if ended.String() != "" {
		t.Errorf("the stream that was open all the time: %s", ended)
	}
}
