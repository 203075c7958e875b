package istiod

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/server/config"
)

// root is the root of the repository.
const root = "../.."

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// decode decodes the only document of a YAML file.
func decode[T any](t *testing.T, file string) T {
	t.Helper()
	var v T
	dec := yaml.NewDecoder(bytes.NewReader(read(t, file)))
	if err := dec.Decode(&v); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return v
}

func parseConfig(t *testing.T, name string, data []byte) config.Config {
	t.Helper()
	c, err := config.Parse(name, data, config.Options{Adapters: []string{"consul", "file", "nacos", "sim"}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// pinned is a whole version, such as 1.22.7.
var pinned = regexp.MustCompile(`:v?\d+\.\d+\.\d+$`)

type compose struct {
	Name     string
	Networks map[string]struct {
		IPAM struct {
			Config []struct{ Subnet netip.Prefix }
		}
	}
	Services map[string]struct {
		Image, Restart string
		Build          struct {
			Context string
			Args    map[string]string
		}
		Command, Entrypoint, Profiles []string
		Environment                   map[string]string
		Volumes, Ports                []string
		Networks                      map[string]struct {
			IPv4 netip.Addr `yaml:"ipv4_address"`
		}
		DependsOn map[string]struct{ Condition string } `yaml:"depends_on"`
		Health    struct {
			Test              []string
			Interval, Timeout string
			Retries           int
		} `yaml:"healthcheck"`
	}
	Instance any `yaml:"x-instance"`
}

// docker-compose.yaml has no field that compose does not know, mounts files
// that exist, publishes to loopback only, and gives each service an address of
// its own.
func TestCompose(t *testing.T) {
	var c compose
	dec := yaml.NewDecoder(bytes.NewReader(read(t, filepath.Join(root, "docker-compose.yaml"))))
	dec.KnownFields(true)
	if err := dec.Decode(&c); err != nil {
		t.Fatal(err)
	}
	subnet := c.Networks["mesh"].IPAM.Config[0].Subnet
	addresses, ports := make(map[netip.Addr]string), make(map[string]string)
	for name, s := range c.Services {
		if s.Build.Context == "" && !pinned.MatchString(s.Image) {
			t.Errorf("%s: image %s has no whole version", name, s.Image)
		}
		for _, v := range s.Volumes {
			host, _, _ := strings.Cut(v, ":")
			if info, err := os.Stat(filepath.Join(root, host)); err != nil || !info.Mode().IsRegular() {
				t.Errorf("%s mounts %s: %v", name, host, err)
			}
			if !strings.HasSuffix(v, ":ro") {
				t.Errorf("%s mounts %s for writing", name, v)
			}
		}
		for _, p := range s.Ports {
			host, ok := strings.CutPrefix(p, "127.0.0.1:")
			port, _, _ := strings.Cut(host, ":")
			if !ok || ports[port] != "" {
				t.Errorf("%s publishes %s: not on loopback, or taken by %s", name, p, ports[port])
			}
			ports[port] = name
		}
		for d, how := range s.DependsOn {
			if len(c.Services[d].Health.Test) == 0 || how.Condition != "service_healthy" {
				t.Errorf("%s depends on %s, which has no health check, or does not wait for it", name, d)
			}
		}
		a := s.Networks["mesh"].IPv4
		if !subnet.Contains(a) || addresses[a] != "" {
			t.Errorf("%s: address %s is not in %s, or taken by %s", name, a, subnet, addresses[a])
		}
		addresses[a] = name
	}
	if s := c.Services["isthmus"]; s.Build.Context != "." {
		t.Errorf("isthmus is built from %q", s.Build.Context)
	}
	if _, err := os.Stat(filepath.Join(root, "Dockerfile")); err != nil {
		t.Error(err)
	}

	// What the services say of each other fits together.
	cfg := parseConfig(t, "compose/isthmus.yaml", read(t, "compose/isthmus.yaml"))
	_, xdsPort, _ := strings.Cut(cfg.Listen.XDS[0].Address, ":")
	mesh := string(read(t, "compose/mesh.yaml"))
	if want := "xds://isthmus:" + xdsPort; !strings.Contains(mesh, want) {
		t.Errorf("compose/mesh.yaml lacks %s", want)
	}
	var consul struct {
		Services []struct {
			ID, Name, Address string
			Port              int
			Check             struct{ TCP string }
		}
	}
	if err := json.Unmarshal(read(t, "compose/consul.json"), &consul); err != nil {
		t.Fatal(err)
	}
	envoy := string(read(t, "compose/envoy.yaml"))
	for _, s := range consul.Services {
		instance := c.Services[s.ID]
		if instance.Networks["mesh"].IPv4.String() != s.Address {
			t.Errorf("consul.json has %s at %s, docker-compose.yaml at %s", s.ID, s.Address, instance.Networks["mesh"].IPv4)
		}
		if !slices.Contains(instance.Command, fmt.Sprintf("-listen=:%d", s.Port)) || s.Check.TCP != fmt.Sprintf("%s:%d", s.Address, s.Port) {
			t.Errorf("%s does not listen where consul.json says, or is checked elsewhere", s.ID)
		}
		if cluster := fmt.Sprintf("outbound|%d||%s.service.consul", s.Port, s.Name); !strings.Contains(envoy, cluster) {
			t.Errorf("compose/envoy.yaml lacks the cluster %s", cluster)
		}
	}
	if len(consul.Services) != 2 {
		t.Errorf("consul.json has %d instances", len(consul.Services))
	}
	decode[map[string]any](t, "compose/envoy.yaml")
	if !strings.Contains(envoy, "address: istiod, port_value: 15011") || !slices.Contains(c.Services["istiod"].Command, "--grpcAddr=:15011") {
		t.Error("Envoy does not ask istiod's gRPC port")
	}
}

// The mesh configuration keeps Kubernetes as a source and names the Service of
// kubernetes.yaml; its Deployment runs a valid configuration on the ports that
// it declares.
func TestKubernetes(t *testing.T) {
	type sources struct {
		MeshConfig struct {
			ConfigSources []struct{ Address string } `yaml:"configSources"`
		} `yaml:"meshConfig"`
	}
	var addresses []string
	for _, s := range decode[sources](t, "mesh-config.yaml").MeshConfig.ConfigSources {
		addresses = append(addresses, s.Address)
	}
	if !slices.Equal(addresses, []string{"k8s://", "xds://isthmus.istio-system.svc:15051"}) {
		t.Errorf("config sources: %q", addresses)
	}

	type object struct {
		Kind     string
		Metadata struct{ Name, Namespace string }
		Data     map[string]string
		Spec     struct {
			Selector any
			Ports    []struct {
				Name string
				Port int
			}
			Template struct {
				Metadata struct{ Labels map[string]string }
				Spec     struct {
					Containers []struct {
						Args  []string
						Ports []struct {
							Name          string
							ContainerPort int `yaml:"containerPort"`
						}
					}
				}
			}
		}
	}
	objects := make(map[string]object)
	for dec := yaml.NewDecoder(bytes.NewReader(read(t, "kubernetes.yaml"))); ; {
		var o object
		if err := dec.Decode(&o); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if o.Metadata.Name != "isthmus" || o.Metadata.Namespace != "istio-system" {
			t.Errorf("%s %s/%s", o.Kind, o.Metadata.Namespace, o.Metadata.Name)
		}
		objects[o.Kind] = o
	}
	if len(objects) != 3 {
		t.Fatalf("kubernetes.yaml has %d objects", len(objects))
	}
	cfg := parseConfig(t, "kubernetes.yaml", []byte(objects["ConfigMap"].Data["isthmus.yaml"]))
	container := objects["Deployment"].Spec.Template.Spec.Containers[0]
	if !slices.Equal(container.Args, []string{"serve", "--config", "/etc/isthmus/isthmus.yaml"}) {
		t.Errorf("args: %q", container.Args)
	}
	names := make(map[string]string)
	for _, p := range container.Ports {
		names[p.Name] = fmt.Sprintf(":%d", p.ContainerPort)
	}
	// Administration without rules is for the pod alone.
	if len(names) != 1 || names["grpc-xds"] != cfg.Listen.XDS[0].Address || cfg.Listen.Admin.Address != "127.0.0.1:15080" {
		t.Errorf("ports %v of the container, %+v in the configuration", names, cfg.Listen)
	}
	for _, p := range objects["Service"].Spec.Ports {
		if names[p.Name] != fmt.Sprintf(":%d", p.Port) {
			t.Errorf("port %s of the Service is %d, of the container %s", p.Name, p.Port, names[p.Name])
		}
	}
	if got, want := fmt.Sprint(objects["Service"].Spec.Selector), fmt.Sprint(map[string]any{"app": "isthmus"}); got != want || objects["Deployment"].Spec.Template.Metadata.Labels["app"] != "isthmus" {
		t.Errorf("the Service selects %s, want %s", got, want)
	}
}
