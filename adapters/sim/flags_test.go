package sim

import (
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// The load flags of nacos-istio stand for a world like its own.
func TestFlags(t *testing.T) {
	c := Defaults
	c.Flags = strings.Fields("--mock=true --mockServiceCount=10001 --mockAvgEndpointCount=2 --mockPushDelay=100 --mockServiceNamePrefix=load -mockTestIncremental --mockIncrementalRatio=10")
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	a, err := New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	conf := a.(*adapter).conf
	if conf.ChangesPerSecond != 10001*10/100.0*10 {
		t.Errorf("changes_per_second is %v", conf.ChangesPerSecond)
	}
	w := newWorld(conf)
	if len(w.services) != 10001 || len(w.services[0].instances) != 20_000 || len(w.services[10_000].instances) != 20_000 || len(w.services[1].instances) != 2 {
		t.Errorf("%d services with %d, %d, ..., %d instances", len(w.services), len(w.services[0].instances), len(w.services[1].instances), len(w.services[10_000].instances))
	}
	if got := w.services[7]; got.Key.Name != "load.7" || got.Ports[0].Number != 8080 {
		t.Errorf("the service 7 is %+v", got.Service)
	}
	c.Flags = []string{"--mockServiceCount=5", "--mockPushDelay=2000"}
	if conf, err := c.Expand(); err != nil || conf.ChangesPerSecond != 0.5 || conf.Instances != 20 || conf.prefix != "mock.service" {
		t.Errorf("without increments: %+v, %v", conf, err)
	}
	for _, bad := range []string{"--services=1", "mock", "--mock=false", "--mockPushDelay=0", "--mockIncrementalRatio=101", "--mockServiceCount=x", "--mockServiceCount=2000000", "--mockServiceNamePrefix="} {
		c.Flags = []string{bad}
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), "flags: ") && !strings.HasPrefix(err.Error(), "services: ") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
