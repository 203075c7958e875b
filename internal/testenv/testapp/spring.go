package testapp

import (
	"maps"
	"net/http"
	"strconv"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testeureka"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testzookeeper"
)

// SpringTool is an application of Spring Cloud, newer than the Eureka server.
var SpringTool = testenv.MavenTool("spring", "spring", "spring", "")

// SpringZooKeeperTool is the same with Spring Cloud's client of ZooKeeper.
var SpringZooKeeperTool = testenv.MavenTool("spring-zookeeper", "spring-zookeeper", "spring-zookeeper", "")

// SpringApp is a running application of Spring Boot that registers with Spring
// Cloud's client.
type SpringApp struct {
	// Port is the port that it registers.
	Port int

	*testenv.Process
}

// StartSpringApp starts an application of that name, registered at the server,
// and waits until it answers. It may not be registered yet by then.
// Properties are appended to its configuration.
func StartSpringApp(t testing.TB, e *testeureka.Server, name string, properties map[string]string) *SpringApp {
	t.Helper()
	all := map[string]string{
		"eureka.client.service-url.defaultZone":                            e.WithUser(e.URL) + "/",
		"eureka.client.initial-instance-info-replication-interval-seconds": "0",
		"eureka.instance.lease-renewal-interval-in-seconds":                "1",
	}
	maps.Copy(all, properties)
	return startSpringApp(t, SpringTool, name, all)
}

// StartSpringZooKeeperApp is StartSpringApp for an application that registers
// in ZooKeeper.
func StartSpringZooKeeperApp(t testing.TB, z *testzookeeper.Server, name string, properties map[string]string) *SpringApp {
	t.Helper()
	all := map[string]string{"spring.cloud.zookeeper.connect-string": z.Addr, "spring.cloud.zookeeper.discovery.instance-host": "127.0.0.1"}
	maps.Copy(all, properties)
	return startSpringApp(t, SpringZooKeeperTool, name, all)
}

func startSpringApp(t testing.TB, tool testenv.Tool, name string, properties map[string]string) *SpringApp {
	t.Helper()
	s := &SpringApp{}
	binary := tool.Binary(t)
	s.Process = testenv.NewProcess(t, "spring")
	s.Process.StartReady(t, func() {
		s.Port = testenv.FreePort(t)
		all := map[string]string{
			"spring.application.name": name, "server.address": "127.0.0.1", "server.port": strconv.Itoa(s.Port),
			"management.endpoints.web.exposure.include": "health,serviceregistry",
		}
		maps.Copy(all, properties)
		s.Process.Start(t, nil, binary, testenv.JavaArgs(s.Process.Dir, 256, all)...)
	}, func() (string, bool) { return testenv.Answers(s.url("/instances/" + name)) })
	return s
}

func (s *SpringApp) url(path string) string { return "http://" + testenv.Loopback(s.Port) + path }

// SetStatus sets its status in Eureka by the actuator: UP, OUT_OF_SERVICE,
// DOWN; CANCEL_OVERRIDE ends that.
func (s *SpringApp) SetStatus(t testing.TB, status string) {
	t.Helper()
	answer, code, err := testenv.Do(t.Context(), nil, http.MethodPost, s.url("/actuator/serviceregistry"), nil, map[string]string{"status": status})
	if err != nil || code != http.StatusOK {
		t.Fatalf("spring: set status %s: status %d %.300s, error %v", status, code, answer, err)
	}
}

// Instances returns the IDs of a service's instances that its own client has,
// sorted.
func (s *SpringApp) Instances(t testing.TB, service string) []string {
	t.Helper()
	var ids []string
	testenv.JSON(t, s.url("/instances/"+service), &ids)
	return ids
}
