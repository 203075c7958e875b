package consul

import (
	"encoding/base64"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	consulv1 "github.com/isthmus-mesh/isthmus/adapters/consul/proto/isthmus/consul/v1"
	"github.com/isthmus-mesh/isthmus/plugin"
)

// TestPeeringFiles shows that a token that cannot be used is named at the
// start.
func TestPeeringFiles(t *testing.T) {
	dir := t.TempDir()
	token := func(text string) string {
		name := filepath.Join(dir, "token")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for text, want := range map[string]string{
		"": "holds no peering token", "?": "holds no peering token", base64.StdEncoding.EncodeToString([]byte("[]")): "holds no peering token",
		base64.StdEncoding.EncodeToString([]byte(`{}`)):           "is incomplete",
		base64.StdEncoding.EncodeToString([]byte(`{"CA":["x"]}`)): "no PEM certificate",
	} {
		c := DefaultConfig
		c.Mode, c.Peering = modePeering, PeeringConfig{TokenFile: token(text), SecretFile: filepath.Join(dir, "secret")}
		_, err := New(c, plugin.Env{})
		if got := err.Error(); !strings.Contains(got, "peering.token_file") || !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// FuzzPeeringToken shows that no token makes parsing panic, and that an
// accepted one has all that is needed.
func FuzzPeeringToken(f *testing.F) {
	f.Add([]byte(base64.StdEncoding.EncodeToString([]byte(`{"CA":null,"ServerAddresses":["a:1"],"ServerName":"n","PeerID":"p","EstablishmentSecret":"s"}`))))
	f.Fuzz(func(t *testing.T, text []byte) {
		if got, _, err := parsePeeringToken(text); err == nil && (got.PeerID == "" || len(got.CA) == 0) {
			t.Errorf("%q: accepted as %+v", text, got)
		}
	})
}

// FuzzPeeringResource shows that no resource makes the adapter panic, and that
// one that cannot be read changes nothing.
func FuzzPeeringResource(f *testing.F) {
	service := &consulv1.ExportedService{Nodes: []*consulv1.CheckServiceNode{
		nil,
		{},
		{Node: &consulv1.Node{Node: "n"}},
		{Node: &consulv1.Node{Node: "n"}, Service: &consulv1.NodeService{Id: "a", Port: -1}, Checks: []*consulv1.HealthCheck{nil, {Status: "maintenance"}}},
	}}
	for url, m := range map[string]proto.Message{urlService: service, urlServices: &consulv1.ExportedServiceList{Services: []string{"web"}}, urlServers: &consulv1.PeeringServerAddresses{}} {
		body, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(url, "web", body)
	}
	f.Fuzz(func(t *testing.T, url, id string, body []byte) {
		r := newRecorder()
		a := &Adapter{config: DefaultConfig, convert: newConverter(DefaultConfig.withDefaults()), env: plugin.Env{Log: slog.New(slog.DiscardHandler)}}
		p := newPeer(a, newState(r), r)
		p.list([]string{"web"})
		p.tell("web", p.convert.instances(entries([]*consulv1.CheckServiceNode{{Node: &consulv1.Node{Node: "n"}, Service: &consulv1.NodeService{Id: "web-1", Port: 80}}})))
		before := r.view()
		if len(before["web"]) != 1 {
			t.Fatalf("the catalog holds %v", before)
		}
		if _, err := p.take(&consulv1.Response{ResourceUrl: url, ResourceId: id, Resource: &anypb.Any{Value: body}}); err != nil {
			if diff := cmp.Diff(before, r.view()); diff != "" || !maps.Equal(p.services, map[string]bool{"web": true}) {
				t.Errorf("%v, and yet something changed: %s", err, diff)
			}
		}
	})
}
