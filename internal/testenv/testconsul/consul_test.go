package testconsul

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/hashicorp/consul/api"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

func TestConsulKeepsCatalogOverRestart(t *testing.T) {
	testenv.SkipIfShort(t)
	c := Start(t, Config{Persistent: true})
	c.Register(t,
		Instance{Service: "web", ID: "web-1", Address: "10.0.0.1", Port: 80, Weight: 3},
		Instance{Service: "web", ID: "web-2", Address: "10.0.0.2", Port: 80, Critical: true},
		Instance{Service: "gone", ID: "gone-1", Address: "10.0.0.3", Port: 80})
	c.Deregister(t, "gone-1")
	check := func() {
		t.Helper()
		if got := c.Services(t); !slices.Equal(got, []string{"consul", "web"}) {
			t.Errorf("services %v, want consul and web", got)
		}
		entries, _, err := c.Client.Health().Service("web", "", false, nil)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for _, e := range entries {
			got[e.Service.ID] = fmt.Sprintf("%s:%d weight %d %s", e.Service.Address, e.Service.Port, e.Service.Weights.Passing, e.Checks.AggregatedStatus())
		}
		want := map[string]string{"web-1": "10.0.0.1:80 weight 3 passing", "web-2": "10.0.0.2:80 weight 1 critical"}
		if !maps.Equal(got, want) {
			t.Errorf("instances of web %v, want %v", got, want)
		}
	}
	check()
	c.Kill()
	if _, err := c.Client.Status().Leader(); err == nil {
		t.Error("the killed server answers")
	}
	c.Restart(t)
	check()
}

func TestConsulWithACLRefusesAnonymous(t *testing.T) {
	testenv.SkipIfShort(t)
	c := Start(t, Config{ACL: true})
	c.Register(t, Instance{Service: "web", ID: "web-1", Address: "10.0.0.1", Port: 80})
	if got := c.Services(t); !slices.Contains(got, "web") {
		t.Errorf("services with the management token %v, want web among them", got)
	}
	anonymous, err := api.NewClient(&api.Config{Address: c.Addr})
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := anonymous.Catalog().Services(nil)
	if err != nil || len(got) != 0 {
		t.Errorf("services without a token %v, error %v; want none, and none", got, err)
	}
}
