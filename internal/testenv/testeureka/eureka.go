// Package testeureka runs Eureka servers for tests.
//
// The server is Spring Cloud's, from the pom in tools/eureka (Maven, ten
// seconds once the packages are there, 55 MB). Start runs one, which takes nine
// seconds; StartPair runs two that replicate.
package testeureka

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// Tool is the Eureka server of Spring Cloud: jars from Maven and the
// launcher in this repository.
var Tool = testenv.MavenTool("eureka", "eureka", "eureka", "")

// Config configures a Eureka server. The zero value is a single server
// without authentication, whose answers are at most a tenth of a second old.
type Config struct {
	// User and Password enable basic authentication.
	User, Password string
	// HeapMB is the memory of the server's heap, in MiB; 0 is 512, enough for
	// some 50,000 instances.
	HeapMB int
	// Properties are appended to the server's configuration.
	Properties map[string]string
}

// Server is a running Eureka server. It stores nothing on disk: after a restart
// it is empty, unless it has a peer.
type Server struct {
	// Port is its port, URL the base of API paths. Restarts keep both.
	URL  string
	Port int

	cfg Config
	*testenv.Process
	binary string
	peers  []string // URLs of the other servers, with credentials
}

// Start starts a server and waits until it is ready.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	e := newServer(t, cfg)
	e.Serve(t, e.choosePort)
	return e
}

// StartPair starts two servers that are peers of each other, and waits
// until both are ready.
func StartPair(t testing.TB, cfg Config) (a, b *Server) {
	t.Helper()
	a, b = newServer(t, cfg), newServer(t, cfg)
	a.choosePort(t)
	b.choosePort(t)
	// Servers distinguish themselves from their peers by host name.
	a.peers = []string{strings.Replace(b.URL, "127.0.0.1", "localhost", 1)}
	b.peers = []string{a.URL}
	a.Launch(t)
	b.Launch(t)
	a.WaitReady(t)
	b.WaitReady(t)
	return a, b
}

func newServer(t testing.TB, cfg Config) *Server {
	t.Helper()
	e := &Server{cfg: cfg, binary: Tool.Binary(t)}
	e.Process = testenv.NewServer(t, "eureka", e.launch, e.ready)
	return e
}

func (e *Server) choosePort(t testing.TB) {
	e.Port = testenv.FreePort(t)
	e.URL = "http://" + testenv.Loopback(e.Port) + "/eureka"
}

func (e *Server) launch(t testing.TB) {
	t.Helper()
	host := "127.0.0.1"
	if len(e.peers) > 0 && strings.Contains(e.peers[0], "127.0.0.1") {
		host = "localhost"
	}
	properties := map[string]string{
		"server.address": "127.0.0.1", "server.port": strconv.Itoa(e.Port),
		"eureka.instance.hostname":                                         host,
		"eureka.client.register-with-eureka":                               "false",
		"eureka.client.fetch-registry":                                     strconv.FormatBool(len(e.peers) > 0),
		"eureka.server.response-cache-update-interval-ms":                  "100",
		"eureka.server.peer-eureka-nodes-update-interval-ms":               "2000",
		"eureka.server.registry-sync-retry-wait-ms":                        "500",
		"eureka.client.initial-instance-info-replication-interval-seconds": "1",
		"eureka.client.registry-fetch-interval-seconds":                    "1",
	}
	zone := e.WithUser(e.URL) // itself, not a peer
	if len(e.peers) > 0 {
		zone = e.WithUser(e.peers[0])
		// As for a server that registers itself: at its start it copies the
		// registry of its peer.
		properties["eureka.server.registry-sync-retries"] = "5"
	}
	properties["eureka.client.service-url.defaultZone"] = zone + "/"
	if e.cfg.User != "" {
		properties["spring.security.user.name"], properties["spring.security.user.password"] = e.cfg.User, e.cfg.Password
	}
	maps.Copy(properties, e.cfg.Properties)
	e.Process.Start(t, nil, e.binary, testenv.JavaArgs(e.Process.Dir, cmp.Or(e.cfg.HeapMB, 512), properties)...)
}

// WithUser adds the credentials to a URL.
func (e *Server) WithUser(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		panic(err)
	}
	if e.cfg.User != "" {
		u.User = url.UserPassword(e.cfg.User, e.cfg.Password)
	}
	return u.String()
}

func (e *Server) ready() (seen string, ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_, err := e.do(ctx, http.MethodGet, "/apps", nil)
	return fmt.Sprint(err), err == nil
}

// Instance is one instance, as a client registers it.
type Instance struct {
	App, ID, Host, IP, Status string // Status: UP if empty
	VIP, SecureVIP            string // the name of the application in lower case if empty
	Port, SecurePort          int    // 0: not enabled
	ASG                       string
	Zone                      string // of Amazon's data centre; "": the instance is in one of one's own
	Metadata                  map[string]string
	LeaseSeconds              int // an hour if 0
}

// dataCenter is an instance's data center. Servers require this order of
// fields.
type dataCenter struct {
	Class    string            `json:"@class"`
	Name     string            `json:"name"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// body returns the body of a registration.
func (i Instance) body() map[string]any {
	port := func(n, instead int) map[string]any {
		if n == 0 {
			return map[string]any{"$": instead, "@enabled": "false"}
		}
		return map[string]any{"$": n, "@enabled": "true"}
	}
	center := dataCenter{Class: "com.netflix.appinfo.InstanceInfo$DefaultDataCenterInfo", Name: "MyOwn"}
	if i.Zone != "" {
		center = dataCenter{"com.netflix.appinfo.AmazonInfo", "Amazon", map[string]string{
			"availability-zone": i.Zone, "instance-id": "i-" + i.ID, "local-ipv4": i.IP,
		}}
	}
	body := map[string]any{
		"instanceId": i.ID, "hostName": cmp.Or(i.Host, i.IP), "app": i.App, "ipAddr": i.IP, "status": cmp.Or(i.Status, "UP"), "overriddenStatus": "UNKNOWN",
		"port": port(i.Port, 7001), "securePort": port(i.SecurePort, 7002), "vipAddress": cmp.Or(i.VIP, strings.ToLower(i.App)),
		"secureVipAddress": cmp.Or(i.SecureVIP, strings.ToLower(i.App)), "countryId": 1, "dataCenterInfo": center,
		"leaseInfo": map[string]any{"renewalIntervalInSecs": 30, "durationInSecs": cmp.Or(i.LeaseSeconds, 3600)}, "lastDirtyTimestamp": strconv.FormatInt(time.Now().UnixMilli(), 10),
	}
	if i.ASG != "" {
		body["asgName"] = i.ASG
	}
	if i.Metadata != nil {
		body["metadata"] = i.Metadata
	}
	return body
}

// Register registers or updates instances.
func (e *Server) Register(t testing.TB, instances ...Instance) {
	t.Helper()
	for _, i := range instances {
		e.must(t, http.MethodPost, "/apps/"+i.App, map[string]any{"instance": i.body()})
	}
}

// RegisterListed is [Eureka.Register], and waits until the server's list of
// everything has the instances. A list that the server began before a
// registration and ended after it stays in its cache until the next one, for up
// to three minutes, while its answers with changes are newer.
func (e *Server) RegisterListed(t testing.TB, instances ...Instance) {
	t.Helper()
	testenv.Eventually(t, testenv.Patience, "the list of Eureka to have what is registered", func() (string, bool) {
		e.Register(t, instances...)
		list := e.must(t, http.MethodGet, "/apps", nil)
		for _, i := range instances {
			if !strings.Contains(list, fmt.Sprintf("\"instanceId\":%q", i.ID)) {
				return list, false
			}
		}
		return "", true
	})
}

// RegisterMany registers instances in batches, as peers do.
func (e *Server) RegisterMany(t testing.TB, instances []Instance) {
	t.Helper()
	for batch := range slices.Chunk(instances, 500) {
		var list []any
		for _, i := range batch {
			list = append(list, map[string]any{
				"appName": i.App, "id": i.ID, "lastDirtyTimestamp": time.Now().UnixMilli(), "overriddenStatus": "UNKNOWN", "status": "UP",
				"instanceInfo": i.body(), "action": "Register",
			})
		}
		answer := e.must(t, http.MethodPost, "/peerreplication/batch/", map[string]any{"replicationList": list})
		if ok := strings.Count(answer, `"statusCode":200`); ok != len(batch) {
			t.Fatalf("eureka: %d of %d registered: %.300s", ok, len(batch), answer)
		}
	}
}

// Deregister cancels an instance.
func (e *Server) Deregister(t testing.TB, app, id string) {
	t.Helper()
	e.must(t, http.MethodDelete, "/apps/"+app+"/"+url.PathEscape(id), nil)
}

// Override overrides the status that an instance reports; "" removes the
// override.
func (e *Server) Override(t testing.TB, app, id, status string) {
	t.Helper()
	path, method := "/apps/"+app+"/"+url.PathEscape(id)+"/status?value="+status, http.MethodPut
	if status == "" {
		path, method = path+"UP", http.MethodDelete
	}
	e.must(t, method, path, nil)
}

// must is do, and ends the test if the request fails.
func (e *Server) must(t testing.TB, method, path string, body any) string {
	t.Helper()
	answer, err := e.do(t.Context(), method, path, body)
	if err != nil {
		t.Fatal(err)
	}
	return answer
}

// do makes a request and returns the body of the answer.
func (e *Server) do(ctx context.Context, method, path string, body any) (string, error) {
	return testenv.Try(ctx, method, e.WithUser(e.URL+path), map[string]string{"Accept": "application/json"}, body)
}
