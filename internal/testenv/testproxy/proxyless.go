package testproxy

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/xds"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// Proxyless is a gRPC client that gets its configuration from istiod, without a
// proxy.
type Proxyless struct {
	target string
	client testpb.TestServiceClient
}

// NewProxyless returns a client for a port of a host, configured by a ready
// istiod.
func NewProxyless(t testing.TB, i *testistiod.Server, host string, port int) *Proxyless {
	t.Helper()
	bootstrap := fmt.Appendf(nil, `{
	"xds_servers": [{"server_uri": %q, "channel_creds": [{"type": "insecure"}], "server_features": ["xds_v3"]}],
	"node": {
		"id": "sidecar~127.0.0.8~proxyless.default~default.svc.cluster.local", "locality": {},
		"metadata": {"GENERATOR": "grpc", "NAMESPACE": "default", "ISTIO_VERSION": "1.24.0", "CLUSTER_ID": "Kubernetes"}
	}
}`, i.GRPC)
	resolver, err := xds.NewXDSResolverWithConfigForTesting(bootstrap)
	if err != nil {
		t.Fatalf("proxyless client: %v", err)
	}
	p := &Proxyless{target: fmt.Sprintf("xds:///%s:%d", host, port)}
	conn, err := grpc.NewClient(p.target, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithResolvers(resolver))
	if err != nil {
		t.Fatalf("proxyless client of %s: %v", p.target, err)
	}
	t.Cleanup(func() { conn.Close() })
	p.client = testpb.NewTestServiceClient(conn)
	return p
}

// Call makes one call and returns the name of the answering instance.
func (p *Proxyless) Call(t testing.TB) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), testenv.CallTime)
	defer cancel()
	res, err := p.client.UnaryCall(ctx, &testpb.SimpleRequest{})
	return res.GetServerId(), err
}

// WaitReaches calls until twenty calls in a row were answered by the wanted
// instances only, and by each at least once.
func (p *Proxyless) WaitReaches(t testing.TB, want ...string) {
	t.Helper()
	waitReaches(t, "gRPC calls to "+p.target, func() (string, error) { return p.Call(t) }, want)
}

func waitReaches(t testing.TB, what string, call func() (string, error), want []string) {
	t.Helper()
	want = slices.Sorted(slices.Values(want))
	testenv.Eventually(t, testenv.Patience, fmt.Sprintf("%s to reach %v", what, want), func() (string, bool) {
		var got []string
		for range 20 {
			name, err := call()
			if err != nil {
				return fmt.Sprintf("answers of %v, then error: %v", slices.Compact(slices.Sorted(slices.Values(got))), err), false
			}
			got = append(got, name)
		}
		slices.Sort(got)
		got = slices.Compact(got)
		return fmt.Sprintf("answers of %v", got), slices.Equal(got, want)
	})
}
