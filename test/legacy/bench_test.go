package legacy

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testpilot"
	"github.com/isthmus-mesh/isthmus/server/view"
)

// figures are those of one source.
type figures struct {
	p50, p99 time.Duration // publish to apply
	cpu      time.Duration // of the source, per update
}

// measure has a source publish one change after the other, each when the one
// before was applied by a real sink of Istio 1.8.0 in another process.
func measure(b *testing.B, source *testpilot.Legacy, incremental bool, updates int) figures {
	b.Helper()
	var at struct{ Address string }
	source.Read(b, &at)
	permits := "none"
	if incremental {
		permits = "all"
	}
	sink := testpilot.StartLegacy(b, "sink", "-address", at.Address, "-incremental", permits, "-measure", "-max-size", "100000000")
	defer sink.Close()
	all := sinks{sink}
	testenv.Eventually(b, testenv.Patience, "the first load", func() (string, bool) {
		st := all.state(b)[0]
		return fmt.Sprintf("%+v", st), st.Resources >= 1000 && st.Collections == 11
	})
	var took []time.Duration
	cpu := func() time.Duration {
		var c struct{ CPU int64 }
		source.Ask(b, "cpu", &c)
		return time.Duration(c.CPU)
	}
	var before time.Duration
	const warm = 5
	pause := time.NewTimer(time.Hour)
	defer pause.Stop()
	for i := range warm + updates {
		if i == warm {
			before = cpu()
		}
		if !incremental {
			// What is compared is a change that comes by itself. Those that
			// come one after the other, Istio's source sends each as all of the
			// collection, the bridge at the pace of view.Interval.
			pause.Reset(view.Interval(10_000_000))
			<-pause.C
		}
		var published, applied struct{ Published, Nanos int64 }
		source.Ask(b, "update", &published)
		sink.Read(b, &applied)
		if applied.Published != published.Published {
			b.Fatalf("published at %d, applied what was published at %d", published.Published, applied.Published)
		}
		if i >= warm {
			took = append(took, time.Duration(applied.Nanos))
		}
	}
	f := figures{cpu: (cpu() - before) / time.Duration(updates)}
	slices.Sort(took)
	f.p50, f.p99 = took[len(took)/2], took[len(took)*99/100]
	return f
}

// BenchmarkBesideIstio compares the bridge with Istio 1.8.0's own
// pkg/mcp/source: 10,000 entries with 10 endpoints, one changed entry per
// update. Both are measured in turns, so that both see the same machine. Run it
// with -benchtime 1x.
func BenchmarkBesideIstio(b *testing.B) {
	binary := filepath.Join(b.TempDir(), "source")
	if out, err := exec.CommandContext(b.Context(), "go", "build", "-o", binary, "./source").CombinedOutput(); err != nil {
		b.Fatalf("go build ./source: %v\n%s", err, out)
	}
	for _, incremental := range []bool{true, false} {
		updates := 30
		name := "full"
		if incremental {
			updates, name = 500, "incremental"
		}
		b.Run(name, func(b *testing.B) {
			args := []string{"-entries", "10000", "-endpoints", "10", fmt.Sprintf("-incremental=%v", incremental)}
			for b.Loop() {
				ours := measure(b, testpilot.StartPeer(b, binary, args...), incremental, updates)
				theirs := measure(b, testpilot.StartLegacy(b, append([]string{"source"}, args...)...), incremental, updates)
				us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
				b.ReportMetric(us(ours.p50), "p50-µs")
				b.ReportMetric(us(ours.p99), "p99-µs")
				b.ReportMetric(us(ours.cpu), "cpu-µs/update")
				b.ReportMetric(us(theirs.p50), "istio-p50-µs")
				b.ReportMetric(us(theirs.p99), "istio-p99-µs")
				b.ReportMetric(us(theirs.cpu), "istio-cpu-µs/update")
				b.ReportMetric(float64(theirs.p50)/float64(ours.p50), "p50-ratio")
				b.ReportMetric(float64(theirs.cpu)/float64(ours.cpu), "cpu-ratio")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
