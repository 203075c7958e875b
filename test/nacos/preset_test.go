package nacos

import (
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testnacos"
)

// With the preset nacos-istio the bridge serves what the module istio of the
// same Nacos does, but for what istiod would reject, and each difference is
// explained.
func TestPresetNacosIstio(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	server := testnacos.Start(t, testnacos.Config{Version: testnacos.V2, Istio: true})
	app := server.Client(t)
	const services = 50
	for i := range services {
		var instances []testnacos.Instance
		for n := range 1 + i%4 {
			in := testnacos.Up(fmt.Sprintf("10.1.%d.%d", i, n+1), 8000+i)
			in.Weight = float64(1 + n*i%7)
			in.Metadata = map[string]string{"version": fmt.Sprintf("v%d", n%2), "app.example.org/team": "blue"}
			switch i % 5 {
			case 1:
				in.Metadata["protocol"] = "tri"
			case 2:
				in.Metadata["protocol"] = "tcp"
			case 3:
				in.Weight += 0.5
			}
			if i%10 == 4 {
				in.Metadata["istio.hostname"] = fmt.Sprintf("shop-%d", i)
			}
			if i == 7 {
				in.Metadata["not legal"] = "x y" // nacos-istio leaves it out
			}
			instances = append(instances, in)
		}
		app.Register(t, "public", []string{"DEFAULT_GROUP", "g1"}[i%2], fmt.Sprintf("service-%d", i), instances...)
	}
	isthmus := testisthmus.Start(t, fmt.Sprintf(`- {name: nacos, type: nacos, config: {servers: [%q]}, translate: {preset: nacos-istio}}`, server.Addr))
	isthmus.WaitReady(t)

	r := waitEqual(t, server.IstioAddr, isthmus.XDS, services)
	t.Log(r)
	for _, d := range r.Differences {
		t.Log(d)
	}
}
