package nacos

import (
	"strings"
	"testing"

	"github.com/nacos-group/nacos-sdk-go/v2/model"

	"github.com/isthmus-mesh/isthmus/internal/dubbo"
	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// TestDubboAsInZooKeeper shows that providers of Dubbo are the same instances
// of the same service whether Nacos or ZooKeeper has them.
func TestDubboAsInZooKeeper(t *testing.T) {
	c := newConverter(Config{Dubbo: true})
	const name = "providers:org.example.Greeter:1.0.0:g"
	var urls []dubbo.Provider
	for _, url := range []string{
		"tri://10.0.0.1:50051/org.example.Greeter?application=shop&interface=org.example.Greeter&group=g&version=1.0.0&methods=a,b&timestamp=1",
		"dubbo://10.0.0.1:20880/org.example.Greeter?application=shop&interface=org.example.Greeter&group=g&version=1.0.0&methods=a,b&timestamp=1",
		"dubbo://10.0.0.2:20880/org.example.Greeter?application=shop&interface=org.example.Greeter&group=g&version=1.0.0&methods=a,c&timestamp=2&weight=200",
	} {
		p, err := dubbo.ParseProvider(url)
		if err != nil {
			t.Fatal(err)
		}
		urls = append(urls, p)
	}
	want, _ := dubbo.Instances(urls)
	var hosts []model.Instance
	for _, p := range urls {
		meta := map[string]string{"protocol": p.Protocol, "category": "providers", "path": "org.example.Greeter"}
		for k, v := range p.Params {
			meta[k] = v
		}
		hosts = append(hosts, model.Instance{Ip: p.Address, Port: uint64(p.Port), Weight: 1, Healthy: true, Enable: true, ClusterName: "DEFAULT", Metadata: meta})
	}
	got := c.answer(name, &model.Service{Hosts: hosts})
	if !plugin.EqualInstances(got.instances, want) || got.problem != "" {
		t.Errorf("%+v\nwant\n%+v", got.instances, want)
	}
	svc := urls[0].Name.Service("dubbo", urls)
	if key := c.service(serviceID{"public", "DEFAULT_GROUP", name}).Key; key != svc.Key {
		t.Errorf("key %+v, want %+v", key, svc.Key)
	}
	for _, k := range []string{"interface", "group", "version", "methods"} {
		if got.meta[k] != svc.Meta[k] {
			t.Errorf("%s is %q, want %q", k, got.meta[k], svc.Meta[k])
		}
	}
	// What Nacos alone can say of an instance counts, too.
	hosts[2].Weight, hosts[2].Healthy, hosts[1].Enable = 0.5, false, false
	all := c.answer(name, &model.Service{Hosts: hosts}).instances
	if !all[0].Disabled || *all[1].Weight != 1 || all[1].Health != registry.HealthCritical {
		t.Errorf("%+v", all)
	}
	off := newConverter(Config{})
	if key := off.service(serviceID{"public", "DEFAULT_GROUP", name}).Key; key.Name != name {
		t.Errorf("without dubbo the key is %+v", key)
	}
}

// TestEndpointsUnreadable shows that an application's instance whose endpoints
// cannot be read keeps its own port, and that this is told.
func TestEndpointsUnreadable(t *testing.T) {
	host := func(ip, endpoints string) model.Instance {
		return model.Instance{Ip: ip, Port: 20880, Weight: 1, Healthy: true, Enable: true, ClusterName: "DEFAULT", Metadata: map[string]string{"dubbo.endpoints": endpoints}}
	}
	service := &model.Service{Hosts: []model.Instance{host("10.0.0.1", "[{"), host("10.0.0.2", `[{"port":0,"protocol":"tri"}]`), host("10.0.0.3", `[{"port":50051,"protocol":"tri"}]`)}}
	got := newConverter(Config{Dubbo: true}).answer("shop", service)
	for i, port := range []int{20880, 20880, 50051} {
		if p := got.instances[i].Ports; len(p) != 1 || p[0].Number != port {
			t.Errorf("ports of %s: %v, want %d", got.instances[i].ID, p, port)
		}
	}
	if p := got.problem; !strings.Contains(p, "instance 10.0.0.1:20880: dubbo.endpoints") || !strings.Contains(p, "1 more like it") {
		t.Errorf("problem %q", p)
	}
	if p := newConverter(Config{}).answer("shop", service).problem; p != "" {
		t.Errorf("without dubbo: problem %q", p)
	}
}
