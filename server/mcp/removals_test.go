package mcp

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	networking "istio.io/api/networking/v1alpha3"

	mcpv1 "github.com/isthmus-mesh/isthmus/server/mcp/proto/isthmus/mcp/v1"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// What a Pilot that reconnects lacks and what it holds in vain are each almost
// as much as it receives. They come in several responses.
func TestRemovalsAreReceived(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, state.Options{})
		const there, gone = 290, 100_000
		for i := range there {
			w.Publish(fmt.Sprintf("dc1/s%d", i), &networking.ServiceEntry{Hosts: []string{strings.Repeat("x", 10_000)}})
		}
		versions := map[string]string{}
		for i := range gone {
			versions[fmt.Sprintf("dc1/gone-with-a-long-name-%016d", i)] = "0123456789abcdef"
		}
		s, err := New(w.View, Config{Profile: "pilot-1.6"}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		conn, stop := serveBufconn(t, s, grpc.MaxCallRecvMsgSize(view.MaxMessage))
		defer stop()
		stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, SourceMethod)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg(&mcpv1.RequestResources{Collection: serviceEntries, InitialResourceVersions: versions, Incremental: true}); err != nil {
			t.Fatal(err)
		}
		for got, removed := 0, 0; got < there || removed < gone; {
			m := new(mcpv1.Resources)
			if err := stream.RecvMsg(m); err != nil {
				t.Fatalf("after %d resources and %d removals: %v", got, removed, err)
			}
			if !m.GetIncremental() {
				t.Fatal("a response replaces what the Pilot holds")
			}
			got += len(m.GetResources())
			for _, name := range m.GetRemovedResources() {
				if _, held := versions[name]; !held {
					t.Fatalf("%s is removed twice, or never was held", name)
				}
				delete(versions, name)
				removed++
			}
			if err := stream.SendMsg(&mcpv1.RequestResources{Collection: serviceEntries, ResponseNonce: m.GetNonce(), Incremental: true}); err != nil {
				t.Fatal(err)
			}
		}
	})
}
