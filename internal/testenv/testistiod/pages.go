package testistiod

import (
	"encoding/json"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Pages are the debug pages and the metrics of an istiod, which those of Pilot
// 1.8 resemble.
type Pages struct {
	// HTTP is the address of the debug pages, Monitoring that of the metrics.
	HTTP, Monitoring string
}

// Metrics returns all metrics by name.
func (p Pages) Metrics(t testing.TB) map[string]*dto.MetricFamily {
	t.Helper()
	return testenv.Metrics(t, "http://"+p.Monitoring+"/metrics")
}

// Config is one resource in istiod.
type Config struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name            string `json:"name"`
		Namespace       string `json:"namespace"`
		ResourceVersion string `json:"resourceVersion"`
		Created         string `json:"creationTimestamp"`
	} `json:"metadata"`
	Spec json.RawMessage `json:"spec"`
}

// Configz returns istiod's resources from its source, by "Kind namespace/name".
func (p Pages) Configz(t testing.TB) map[string]Config {
	t.Helper()
	var list []Config
	testenv.JSON(t, "http://"+p.HTTP+"/debug/configz", &list)
	m := map[string]Config{}
	for _, c := range list {
		m[c.Kind+" "+c.Metadata.Namespace+"/"+c.Metadata.Name] = c
	}
	return m
}

// IstiodEndpoint is an endpoint in istiod.
type IstiodEndpoint struct {
	// Addr is "IP:PORT".
	Addr    string
	TLSMode string
	// Locality is "region/zone/subzone".
	Locality string
}

// EndpointShards returns istiod's endpoint addresses by host, as "IP:PORT",
// sorted.
func (p Pages) EndpointShards(t testing.TB) map[string][]string {
	t.Helper()
	hosts := map[string][]string{}
	for host, all := range p.Endpoints(t) {
		for _, e := range all {
			hosts[host] = append(hosts[host], e.Addr)
		}
	}
	return hosts
}

// Endpoints returns istiod's endpoints by host, sorted by address.
func (p Pages) Endpoints(t testing.TB) map[string][]IstiodEndpoint {
	t.Helper()
	// host, namespace, then shards by cluster.
	var all map[string]map[string]struct {
		Shards map[string][]struct {
			Address      string // before 1.25
			Addresses    []string
			EndpointPort int
			TLSMode      string
			Locality     struct{ Label string }
		}
	}
	testenv.JSON(t, "http://"+p.HTTP+"/debug/endpointShardz", &all)
	hosts := map[string][]IstiodEndpoint{}
	for host, namespaces := range all {
		for _, namespace := range namespaces {
			for _, shard := range namespace.Shards {
				for _, e := range shard {
					address := e.Address
					if len(e.Addresses) > 0 {
						address = e.Addresses[0]
					}
					hosts[host] = append(hosts[host], IstiodEndpoint{net.JoinHostPort(address, strconv.Itoa(e.EndpointPort)), e.TLSMode, e.Locality.Label})
				}
			}
		}
		slices.SortFunc(hosts[host], func(a, b IstiodEndpoint) int { return strings.Compare(a.Addr, b.Addr) })
	}
	return hosts
}

// Hosts returns the hosts of all services in istiod, sorted.
func (p Pages) Hosts(t testing.TB) []string {
	t.Helper()
	var services []struct {
		Hostname string `json:"hostname"`
	}
	testenv.JSON(t, "http://"+p.HTTP+"/debug/registryz", &services)
	var hosts []string
	for _, s := range services {
		hosts = append(hosts, s.Hostname)
	}
	slices.Sort(hosts)
	return slices.Compact(hosts)
}
