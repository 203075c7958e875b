package plugin

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/wire"
)

// A stream is told all metrics first, and then what changed.
func TestMetricsAreToldOnce(t *testing.T) {
	m := &Metrics{}
	asked, held := m.Counter("asked_total", "Requests."), m.Gauge("held", "Services.")
	one, two := toldMetrics{}, toldMetrics{}
	tell := func(t toldMetrics) string {
		var b strings.Builder
		for _, n := range m.changed(t) {
			fmt.Fprintf(&b, "%s %v %v ", n.GetName(), n.GetKind().Number(), n.GetValue())
		}
		return b.String()
	}
	if got := tell(one); got != "asked_total 1 0 held 2 0 " {
		t.Errorf("first %q", got)
	}
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			for range 1000 {
				asked.Inc()
			}
		})
	}
	wg.Wait()
	if got := tell(one); got != "asked_total 1 10000 " {
		t.Errorf("then %q", got)
	}
	held.Set(-2.5)
	if got := tell(one) + "| " + tell(one) + "| " + tell(two); got != "held 2 -2.5 | | asked_total 1 10000 held 2 -2.5 " {
		t.Errorf("at last %q", got)
	}
}

// Faults of the program are found when it starts, and tests need no bridge.
func TestMetricsFaults(t *testing.T) {
	var none *Metrics
	none.Counter("asked_total", "").Inc()
	none.Gauge("held", "").Set(1)
	m := &Metrics{}
	for i := range wire.MaxMetrics {
		m.Gauge(fmt.Sprint("g", i), "")
	}
	for name, do := range map[string]func(){
		"no total": func() { none.Counter("asked", "") },
		"total":    func() { none.Gauge("asked_total", "") },
		"name":     func() { none.Gauge("Asked", "") },
		"falls":    func() { none.Counter("asked_total", "").Add(-1) },
		"too many": func() { m.Gauge("one_more", "") },
		"twice":    func() { m := &Metrics{}; m.Gauge("a", ""); m.Gauge("a", "") },
	} {
		func() {
			defer func() {
				if p := recover(); p == nil || !strings.HasPrefix(fmt.Sprint(p), "BUG: ") {
					t.Errorf("%s: %v", name, p)
				}
			}()
			do()
		}()
	}
}
