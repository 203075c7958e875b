package xds

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

// The sets of types that istiods of all ages ask for, in the order in which
// they do. Those of 1.24.0 and of the build of August 2026 were seen; the older
// ones are made from what tells the releases apart, and no binary was asked.
var asked = map[string][]string{
	"istio-1.9": {
		"core/v1alpha1/MeshConfig", "networking.istio.io/v1alpha3/DestinationRule", "networking.istio.io/v1alpha3/EnvoyFilter",
		"networking.istio.io/v1alpha3/Gateway", "networking.istio.io/v1alpha3/ServiceEntry", "networking.istio.io/v1alpha3/Sidecar",
		"networking.istio.io/v1alpha3/VirtualService", "networking.istio.io/v1alpha3/WorkloadEntry", "networking.istio.io/v1alpha3/WorkloadGroup",
		"security.istio.io/v1beta1/AuthorizationPolicy", "security.istio.io/v1beta1/PeerAuthentication", "security.istio.io/v1beta1/RequestAuthentication",
	},
	"istio-1.24": {
		"core/v1alpha1/MeshConfig", "security.istio.io/v1/AuthorizationPolicy", "networking.istio.io/v1/DestinationRule",
		"networking.istio.io/v1alpha3/EnvoyFilter", "networking.istio.io/v1/Gateway", "security.istio.io/v1/PeerAuthentication",
		"networking.istio.io/v1beta1/ProxyConfig", "security.istio.io/v1/RequestAuthentication", "networking.istio.io/v1/ServiceEntry",
		"networking.istio.io/v1/Sidecar", "telemetry.istio.io/v1/Telemetry", "networking.istio.io/v1/VirtualService",
		"extensions.istio.io/v1alpha1/WasmPlugin", "networking.istio.io/v1/WorkloadEntry", "networking.istio.io/v1/WorkloadGroup",
	},
}

func init() {
	after := func(name string, more ...string) []string { return append(slices.Clone(asked[name]), more...) }
	asked["istio-1.10"] = after("istio-1.9", "telemetry.istio.io/v1alpha1/Telemetry")
	asked["istio-1.12"] = after("istio-1.10", "extensions.istio.io/v1alpha1/WasmPlugin")
	asked["istio-1.13"] = after("istio-1.12", "networking.istio.io/v1beta1/ProxyConfig")
	i := slices.Index(asked["istio-1.24"], "networking.istio.io/v1/VirtualService")
	asked["istio-1.30"] = slices.Insert(slices.Clone(asked["istio-1.24"]), i, "extensions.istio.io/v1alpha1/TrafficExtension")
	asked["tools"] = []string{"networking.istio.io/v1/ServiceEntry", "networking.istio.io/v1/WorkloadEntry"}
}

func fingerprintOf(urls []string) (f fingerprint) {
	for _, u := range urls {
		f.add(u, collection.OfTypeURL(u))
	}
	return f
}

// Each set of types finds its profile; every profile but that of 1.23 is found
// by one; those of 1.24 and later are known without waiting when the last type
// is asked for, and no earlier than they can be told apart.
func TestFingerprints(t *testing.T) {
	for _, name := range Profiles() {
		urls := asked[name]
		if name == istio123 {
			continue // is named in the configuration
		}
		if urls == nil {
			t.Errorf("%s: nobody asks so", name)
			continue
		}
		f := fingerprintOf(urls)
		if got := f.profile().Name; got != name {
			t.Errorf("%s: found %s", name, got)
		}
		if want := name == "istio-1.24" || name == "istio-1.30" || name == "tools"; f.complete() != want {
			t.Errorf("%s: complete is %v, want %v", name, f.complete(), want)
		}
		for i := 1; i < len(urls); i++ {
			if f := fingerprintOf(urls[:i]); f.complete() && f.profile().Name != name {
				t.Errorf("%s: taken for %s after %v", name, f.profile().Name, urls[:i])
			}
		}
	}
}

// The table says something in every field, no two rows have one name, and for
// each there is a transcript that shows the bytes of its form.
func TestTable(t *testing.T) {
	for _, p := range profiles {
		if p.Name == "" || p.Versions == "" || !strings.HasSuffix(p.Why, ".") {
			t.Errorf("%+v", p)
		}
		if q, err := profiles.Find(p.Name); err != nil || q != p {
			t.Errorf("%s: found %+v, error %v", p.Name, q, err)
		}
		transcript, err := os.ReadFile("testdata/form_" + p.Name + ".txtar")
		if err != nil {
			t.Error(err)
		} else if !strings.Contains(string(transcript), `"profile": "`+p.Name+`"`) {
			t.Errorf("testdata/form_%s.txtar shows another profile", p.Name)
		}
	}
}
