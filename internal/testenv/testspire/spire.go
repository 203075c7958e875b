// Package testspire runs a SPIRE server with an agent for tests.
//
// Both are built from the module pinned in tools/spire (five minutes, once),
// and start in some seconds.
package testspire

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
)

// SPIREServerTool and SPIREAgentTool are the server and the agent of SPIRE.
var (
	ServerTool = spireTool("spire-server")
	AgentTool  = spireTool("spire-agent")
)

func spireTool(binary string) testenv.Tool {
	t := testenv.GoTool("spire", binary, "github.com/spiffe/spire", "github.com/spiffe/spire/cmd/"+binary)
	t.Name = binary
	return t
}

// spireCallTime bounds a command of SPIRE.
const spireCallTime = 30 * time.Second

// Server is a running SPIRE server with an agent, of the trust domain
// example.org.
type Server struct {
	// Socket is the address of the agent's Workload API, unix://PATH.
	Socket string
	// Agent serves the Workload API. Client is its program, which Fetch runs.
	Agent  *testenv.Process
	Client string

	server *testenv.Process
	binary string
	dir    string
	port   int
}

// Start starts a server and an agent that it has attested by a token. No
// process has an identity, see Register.
func Start(t testing.TB) *Server {
	t.Helper()
	// A path of a socket has at most 107 bytes.
	dir, err := os.MkdirTemp("", "spire")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &Server{binary: ServerTool.Binary(t), Client: AgentTool.Binary(t), dir: dir, Socket: "unix://" + filepath.Join(dir, "agent.sock")}
	s.server, s.Agent = testenv.NewProcess(t, "spire-server"), testenv.NewProcess(t, "spire-agent")
	s.server.StartReady(t, func() {
		s.port = testenv.FreePort(t)
		config := s.server.WriteFile(t, "server.conf", fmt.Sprintf(`
server {
  bind_address = "127.0.0.1"
  bind_port = "%d"
  socket_path = %q
  trust_domain = "example.org"
  data_dir = %q
  ca_ttl = "24h"
}
plugins {
  DataStore "sql" { plugin_data { database_type = "sqlite3", connection_string = %q } }
  KeyManager "memory" { plugin_data {} }
  NodeAttestor "join_token" { plugin_data {} }
}
`, s.port, filepath.Join(dir, "server.sock"), filepath.Join(dir, "server"), filepath.Join(dir, "entries.sqlite3")))
		s.server.Start(t, nil, s.binary, "run", "-config", config)
	}, s.healthy(t, s.binary, "server.sock"))

	// "Token: TEXT" is the first line.
	out := s.admin(t, "token", "generate", "-spiffeID", "spiffe://example.org/node")
	line, _, _ := strings.Cut(out, "\n")
	_, token, ok := strings.Cut(line, "Token: ")
	if !ok {
		t.Fatalf("spire-server gives no token: %s", out)
	}
	config := s.Agent.WriteFile(t, "agent.conf", fmt.Sprintf(`
agent {
  server_address = "127.0.0.1"
  server_port = "%d"
  socket_path = %q
  trust_domain = "example.org"
  data_dir = %q
  insecure_bootstrap = true
  join_token = %q
}
plugins {
  KeyManager "memory" { plugin_data {} }
  NodeAttestor "join_token" { plugin_data {} }
  WorkloadAttestor "unix" { plugin_data { discover_workload_path = true } }
}
`, s.port, filepath.Join(dir, "agent.sock"), filepath.Join(dir, "agent"), strings.TrimSpace(token)))
	s.Agent.Start(t, nil, s.Client, "run", "-config", config)
	s.Agent.Await(t, s.healthy(t, s.Client, "agent.sock"))
	return s
}

// healthy returns a check of a program that listens on a socket.
func (s *Server) healthy(t testing.TB, binary, socket string) func() (string, bool) {
	return func() (string, bool) {
		out, err := s.command(t, binary, "healthcheck", "-socketPath", filepath.Join(s.dir, socket))
		return out, err == nil
	}
}

// command runs a program and returns what it writes.
func (s *Server) command(t testing.TB, binary string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(t.Context(), spireCallTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, binary, args...).CombinedOutput()
	return string(out), err
}

func (s *Server) admin(t testing.TB, args ...string) string {
	t.Helper()
	out, err := s.command(t, s.binary, append(args, "-socketPath", filepath.Join(s.dir, "server.sock"))...)
	if err != nil {
		t.Fatalf("spire-server %v: %v: %s", args, err, out)
	}
	return out
}

// Register gives processes that run a program the identity
// spiffe://example.org/NAME and the DNS name NAME.example.org, with
// certificates that last for lifetime, in whole seconds. The agent renews one
// when half of that is over. It returns the ID of the entry.
func (s *Server) Register(t testing.TB, name, program string, lifetime time.Duration) (entry string) {
	t.Helper()
	out := s.admin(t, "entry", "create", "-parentID", "spiffe://example.org/node", "-spiffeID", "spiffe://example.org/"+name,
		"-dns", name+".example.org", "-selector", "unix:path:"+program, "-x509SVIDTTL", strconv.Itoa(int(lifetime.Seconds())))
	for line := range strings.Lines(out) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "Entry ID" {
			return strings.TrimSpace(value)
		}
	}
	t.Fatalf("spire-server registers nothing: %s", out)
	return ""
}

// Unregister takes an entry back.
func (s *Server) Unregister(t testing.TB, entry string) {
	t.Helper()
	s.admin(t, "entry", "delete", "-entryID", entry)
}

// Fetch asks the agent for the identity of its own client, and returns the
// paths of the PEM files of certificate, key and authorities. It waits until
// there is one.
func (s *Server) Fetch(t testing.TB) (cert, key, bundle string) {
	t.Helper()
	dir := t.TempDir()
	testenv.Eventually(t, testenv.Patience, "the agent to give an identity", func() (string, bool) {
		out, err := s.command(t, s.Client, "api", "fetch", "x509", "-socketPath", filepath.Join(s.dir, "agent.sock"), "-write", dir)
		return out, err == nil
	})
	return filepath.Join(dir, "svid.0.pem"), filepath.Join(dir, "svid.0.key"), filepath.Join(dir, "bundle.0.pem")
}
