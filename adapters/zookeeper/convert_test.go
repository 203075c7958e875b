package zookeeper

import (
	"fmt"
	"testing"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestParseInstance shows what becomes of what Spring Cloud, Curator and Dubbo
// write.
func TestParseInstance(t *testing.T) {
	for _, c := range []struct {
		name, data string
		want       registry.Instance
		wrong      bool
	}{
		{
			name: "Spring Cloud", want: registry.Instance{Address: "10.0.0.1", Ports: []registry.Port{{Number: 8080}}, Meta: map[string]string{"zone": "a"}, Health: registry.HealthPassing},
			data: `{"name":"web","id":"x","address":"10.0.0.1","port":8080,"sslPort":null,"payload":{"@class":"org.springframework.cloud.zookeeper.discovery.ZookeeperInstance","id":"web","name":"web","metadata":{"instance_status":"UP","zone":"a"}},"serviceType":"DYNAMIC","uriSpec":{"parts":[{"value":"scheme","variable":true}]}}`,
		},
		{name: "down", data: `{"address":"a","port":1,"payload":{"metadata":{"instance_status":"DOWN"}}}`, want: registry.Instance{Address: "a", Ports: []registry.Port{{Number: 1}}, Health: registry.HealthCritical}},
		{
			name: "two ports", data: `{"address":"a","port":80,"sslPort":443}`,
			want: registry.Instance{Address: "a", Ports: []registry.Port{{Name: "http", Number: 80, Protocol: "http"}, {Name: "https", Number: 443, Protocol: "https"}}},
		},
		{name: "TLS only", data: `{"address":"a","port":0,"sslPort":443}`, want: registry.Instance{Address: "a", Ports: []registry.Port{{Name: "https", Number: 443, Protocol: "https"}}}},
		{name: "a payload of one's own", data: `{"address":"a","port":80,"payload":{"@class":"x","team":"b","n":3,"deep":{"x":1}},"enabled":false}`, want: registry.Instance{Address: "a", Ports: []registry.Port{{Number: 80}}, Meta: map[string]string{"team": "b", "n": "3"}, Disabled: true}},
		{name: "a payload of text", data: `{"address":"a","port":80,"payload":"x"}`, want: registry.Instance{Address: "a", Ports: []registry.Port{{Number: 80}}}},
		{name: "no port", data: `{"address":"a"}`, want: registry.Instance{Address: "a"}},
		{name: "no object", data: `[1]`, wrong: true},
		{name: "nothing", data: ``, wrong: true},
		{name: "a port too large", data: `{"address":"a","port":70000}`, wrong: true},
		{name: "endpoints that are none", data: `{"address":"a","port":1,"payload":{"metadata":{"dubbo.endpoints":"x"}}}`, wrong: true},
	} {
		got, err := parseInstance("id", []byte(c.data))
		c.want.ID = "id"
		if (err != nil) != c.wrong || err == nil && fmt.Sprintf("%+v", got.in) != fmt.Sprintf("%+v", c.want) {
			t.Errorf("%s: %+v, %v", c.name, got.in, err)
		}
	}
}
