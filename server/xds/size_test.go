package xds

import (
	"context"
	"fmt"
	runtimemetrics "runtime/metrics"
	"slices"
	"testing"
	"time"

	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// sized returns services of ten instances each, and changes of one instance.
func sized(b *testing.B, services int) *source {
	b.Helper()
	w := servertest.New(b, state.Options{MaxResources: 2_000_000})
	var batch []*pluginv1.Upsert
	for i := range services {
		name := fmt.Sprintf("ns/service-%d", i)
		w.Entry(name, fmt.Sprintf("service-%d.example.org", i))
		for j := range 10 {
			batch = append(batch, w.InstanceUpsert(name, fmt.Sprintf("%s-%d", name, j), fmt.Sprintf("10.%d.%d.%d", i/250%250, i%250, j+1), 1))
		}
		if len(batch) >= 1000 {
			w.Apply(batch...)
			batch = nil
		}
	}
	w.Apply(batch...)
	flips := make([]flip, 500)
	for i := range flips {
		k := i * (services / len(flips))
		name := fmt.Sprintf("ns/service-%d", k)
		for v := range flips[i] {
			flips[i][v] = w.InstanceUpsert(name, name+"-5", fmt.Sprintf("10.%d.%d.6", k/250%250, k%250), uint32(2+v))
		}
	}
	return &source{w: w, flips: flips}
}

// BenchmarkSize is a mesh of 10,000 and one of 1,000,000 instances in one
// process. sync is everything to a delta sink that connects, over TCP, until
// it has acknowledged the last response; grown-MB is by how much the memory
// that the process holds of the system grew meanwhile, the client's included.
// change is one changed instance, from the plugin's message until the sink has
// it; the sizes take turns, so that both see the same machine.
func BenchmarkSize(b *testing.B) {
	sizes := []int{10_000, 1_000_000}
	sources := make([]*source, len(sizes))
	conns := make([]func(context.Context, *testing.B, map[string]string) *wireSink, len(sizes))
	for i, size := range sizes {
		sources[i] = sized(b, size/10)
		server := newServer(b, sources[i].w, Config{})
		conn := loopback(b, register(server))
		conns[i] = func(ctx context.Context, b *testing.B, have map[string]string) *wireSink {
			return newWireSink(ctx, b, conn, true, workloadsV1, have)
		}
	}
	for i, size := range sizes {
		b.Run(fmt.Sprintf("sync/instances=%d", size), func(b *testing.B) {
			grown := uint64(0)
			for b.Loop() {
				before := held()
				ctx, cancel := context.WithCancel(b.Context())
				sink := conns[i](ctx, b, nil)
				for got := 0; got < size; {
					got += sink.count(b)
					now := held()
					grown = max(grown, now-min(now, before))
				}
				cancel()
			}
			b.ReportMetric(float64(grown)/1e6, "grown-MB")
		})
	}
	b.Run("change", func(b *testing.B) {
		ctx, cancel := context.WithCancel(b.Context())
		defer cancel()
		sinks := make([]*wireSink, len(sizes))
		for i, size := range sizes {
			sinks[i] = conns[i](ctx, b, nil)
			for got := 0; got < size; {
				got += sinks[i].count(b)
			}
		}
		took := make([][]float64, len(sizes))
		for b.Loop() {
			for i := range sizes {
				start := time.Now()
				sources[i].next()
				sinks[i].take(b)
				took[i] = append(took[i], float64(time.Since(start).Nanoseconds())/1e3)
			}
		}
		for i, size := range sizes {
			slices.Sort(took[i])
			b.ReportMetric(took[i][len(took[i])/2], fmt.Sprintf("µs/%d", size))
		}
		b.ReportMetric(took[1][len(took[1])/2]/took[0][len(took[0])/2], "ratio")
	})
}

// held returns the bytes that the runtime holds of the system.
func held() uint64 {
	s := []runtimemetrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	runtimemetrics.Read(s)
	return s[0].Value.Uint64() - s[1].Value.Uint64()
}
