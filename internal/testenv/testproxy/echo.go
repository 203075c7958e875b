package testproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"

	"google.golang.org/grpc"
	testpb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Backend is a server in the test process that answers every call with its
// name: an instance for real calls.
type Backend struct {
	// Name is its answer.
	Name string
	// Address and Port are those of its listener.
	Address string
	Port    int

	stop func()
}

// Stop shuts the server down gracefully: it answers pending calls and refuses
// new ones.
func (b Backend) Stop() { b.stop() }

// Addr returns host:port.
func (b Backend) Addr() string { return net.JoinHostPort(b.Address, fmt.Sprint(b.Port)) }

// StartHTTPBackend starts an HTTP backend on loopback.
func StartHTTPBackend(t testing.TB, name string) Backend {
	t.Helper()
	l, b := listenBackend(t, name)
	return startHTTP(t, l, b)
}

// StartHTTPBackends starts HTTP backends on one port and an address of loopback
// each, as instances of one service usually are.
func StartHTTPBackends(t testing.TB, names ...string) []Backend {
	t.Helper()
	const attempts = 20
	for attempt := 1; ; attempt++ {
		var listeners []net.Listener
		var all []Backend
		var failed error
		port := testenv.FreePort(t)
		for n, name := range names {
			b := Backend{Name: name, Address: fmt.Sprintf("127.0.0.%d", n+1), Port: port}
			l, err := net.Listen("tcp", b.Addr())
			if err != nil {
				failed = err
				break
			}
			listeners, all = append(listeners, l), append(all, b)
		}
		if failed == nil {
			for n := range all {
				all[n] = startHTTP(t, listeners[n], all[n])
			}
			return all
		}
		for _, l := range listeners {
			l.Close()
		}
		if attempt == attempts {
			t.Fatalf("backends %v: %v", names, failed)
		}
	}
}

func startHTTP(t testing.TB, l net.Listener, b Backend) Backend {
	t.Helper()
	name := b.Name
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, name) })}
	b.stop = serve(t, name, func() error { return srv.Serve(l) }, func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.CallTime)
		defer cancel()
		if srv.Shutdown(ctx) != nil {
			srv.Close()
		}
	}, http.ErrServerClosed)
	return b
}

// Outside returns a backend under an address of the machine that is none of
// loopback, by which a server in between reaches it. It answers with an error
// once the backend has stopped.
func Outside(t testing.TB, b Backend) Backend {
	t.Helper()
	address := ""
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && address == "" && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			address = n.IP.String()
		}
	}
	if address == "" {
		t.Fatalf("the machine has no IPv4 address but those of loopback: %v", all)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: b.Addr()})
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	proxy.Transport = transport
	srv := &http.Server{Handler: proxy}
	outside := Backend{Name: b.Name, Address: address, Port: l.Addr().(*net.TCPAddr).Port}
	outside.stop = serve(t, b.Name, func() error { return srv.Serve(l) }, func() { srv.Close() }, http.ErrServerClosed)
	return outside
}

// StartGRPCBackend starts a gRPC backend (grpc.testing.TestService, UnaryCall)
// on loopback.
func StartGRPCBackend(t testing.TB, name string) Backend {
	t.Helper()
	l, b := listenBackend(t, name)
	srv := grpc.NewServer()
	testpb.RegisterTestServiceServer(srv, grpcBackend{name: name})
	b.stop = serve(t, name, func() error { return srv.Serve(l) }, srv.GracefulStop, grpc.ErrServerStopped)
	return b
}

func listenBackend(t testing.TB, name string) (net.Listener, Backend) {
	t.Helper()
	port := testenv.FreePort(t)
	l, err := net.Listen("tcp", testenv.Loopback(port))
	if err != nil {
		t.Fatalf("backend %s: %v", name, err)
	}
	return l, Backend{Name: name, Address: "127.0.0.1", Port: port}
}

// serve runs a server until the returned function stops it, or the test ends.
func serve(t testing.TB, name string, run func() error, stop func(), stopped error) (stopOnce func()) {
	done := make(chan error, 1)
	// Owned by the test; ends when the cleanup stops the server.
	go func() { done <- run() }()
	stopOnce = sync.OnceFunc(func() {
		stop()
		if err := <-done; err != nil && !errors.Is(err, stopped) {
			t.Errorf("backend %s: %v", name, err)
		}
	})
	t.Cleanup(stopOnce)
	return stopOnce
}

type grpcBackend struct {
	testpb.UnimplementedTestServiceServer

	name string
}

// UnaryCall answers with the backend's name.
func (b grpcBackend) UnaryCall(context.Context, *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	return &testpb.SimpleResponse{ServerId: b.name}, nil
}
