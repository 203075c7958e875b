package testproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
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
	return startHTTP(t, name, "127.0.0.1", testenv.FreePort(t))
}

// StartHTTPBackends starts HTTP backends on one port and an address of loopback
// each, as instances of one service usually are.
func StartHTTPBackends(t testing.TB, names ...string) (all []Backend) {
	t.Helper()
	port := testenv.FreePort(t)
	for n, name := range names {
		all = append(all, startHTTP(t, name, fmt.Sprintf("127.0.0.%d", n+1), port))
	}
	return all
}

func startHTTP(t testing.TB, name, address string, port int) Backend {
	t.Helper()
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, name) })}
	return serve(t, Backend{Name: name, Address: address, Port: port}, srv.Serve, func() {
		ctx, cancel := context.WithTimeout(context.Background(), testenv.CallTime)
		defer cancel()
		if srv.Shutdown(ctx) != nil {
			srv.Close()
		}
	}, http.ErrServerClosed)
}

// Outside returns a backend under an address of the machine that is none of
// loopback, by which a server in between reaches it.
func Outside(t testing.TB, b Backend) Backend {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			gate := testenv.NewGate(t, b.Addr())
			b.Address, b.Port = n.IP.String(), testenv.FreePort(t)
			gate.Addr = b.Addr()
			gate.Open(t)
			b.stop = gate.Shut
			return b
		}
	}
	t.Fatalf("the machine has no IPv4 address but those of loopback: %v", all)
	return b
}

// StartGRPCBackend starts a gRPC backend (grpc.testing.TestService, UnaryCall)
// on loopback.
func StartGRPCBackend(t testing.TB, name string) Backend {
	t.Helper()
	srv := grpc.NewServer()
	testpb.RegisterTestServiceServer(srv, grpcBackend{name: name})
	return serve(t, Backend{Name: name, Address: "127.0.0.1", Port: testenv.FreePort(t)}, srv.Serve, srv.GracefulStop, grpc.ErrServerStopped)
}

// serve runs the server of a backend until it is stopped, or the test ends.
func serve(t testing.TB, b Backend, run func(net.Listener) error, stop func(), stopped error) Backend {
	t.Helper()
	l, err := net.Listen("tcp", b.Addr())
	if err != nil {
		t.Fatalf("backend %s: %v", b.Name, err)
	}
	done := make(chan error, 1)
	// Owned by the test; ends when the cleanup stops the server.
	go func() { done <- run(l) }()
	b.stop = sync.OnceFunc(func() {
		stop()
		if err := <-done; err != nil && !errors.Is(err, stopped) {
			t.Errorf("backend %s: %v", b.Name, err)
		}
	})
	t.Cleanup(b.stop)
	return b
}

type grpcBackend struct {
	testpb.UnimplementedTestServiceServer

	name string
}

// UnaryCall answers with the backend's name.
func (b grpcBackend) UnaryCall(context.Context, *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	return &testpb.SimpleResponse{ServerId: b.name}, nil
}
