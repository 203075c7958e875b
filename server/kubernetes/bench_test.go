package kubernetes

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// What the stubs of 10,000 services cost on a real API server: to write them,
// to find them again after a restart, and when each service gets ten instances.
// It takes minutes.
func BenchmarkStubs(b *testing.B) {
	const services, instances = 10000, 10
	c := newCluster(b, testkube.Start(b, testkube.Config{Istio: true}))
	for i := range services {
		c.w.Entry(fmt.Sprintf("%s/web-%d", c.name, i), fmt.Sprintf("web-%d.shop", i))
	}
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc) / 1e6
	}
	written := func(of *Consumer, n int) {
		b.Helper()
		testwait.Eventually(b, 20*time.Minute, fmt.Sprintf("%d objects", n), func() (string, bool) {
			st := of.Status()
			return fmt.Sprintf("%+v", st), st.Writer && st.Objects[Written] == n
		})
	}
	began, before := time.Now(), heap()
	first, stop := c.start(func(o *Options) { o.WritesPerSecond = 1000 })
	written(first, services)
	b.ReportMetric(time.Since(began).Seconds(), "s/start")
	b.ReportMetric(heap()-before, "MB")
	b.ReportMetric(float64(first.Status().Writes.Applied), "writes/start")
	stop()

	began = time.Now()
	second, stop := c.start(func(o *Options) { o.WritesPerSecond = 1000 })
	written(second, services)
	b.ReportMetric(time.Since(began).Seconds(), "s/restart")
	b.ReportMetric(float64(second.Status().Writes.Applied), "writes/restart")

	began = time.Now()
	for i := range services {
		var addresses []string
		for j := range instances {
			addresses = append(addresses, fmt.Sprintf("10.%d.%d.%d", j, i/256, i%256))
		}
		c.w.Instances(fmt.Sprintf("%s/web-%d", c.name, i), addresses...)
	}
	c.w.Entry(c.name+"/marker", "marker.shop") // is behind them
	written(second, services+1)
	b.ReportMetric(time.Since(began).Seconds(), "s/flood")
	if w := second.Status().Writes; w.Applied != 1 || w.Removed != 0 {
		b.Errorf("after %d instances and a service it wrote %+v", services*instances, w)
	}
	stop()
}
