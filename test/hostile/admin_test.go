package hostile

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

func init() {
	attacks = append(attacks,
		attack{"queries", "queries of the admin API without end over 64 connections: resources with bodies, services, changes, metrics, pages", func(ctx context.Context, g *target) {
			paths := []string{"/api/v1/resources?body=true&limit=1000", "/api/v1/services?limit=1000", "/api/v1/changes?limit=1000", "/metrics", "/services?q=1", "/problems"}
			parallel(64, func(i int) {
				again(ctx, func() { query(ctx, attacker, "http://"+g.Admin+paths[i%len(paths)], "", "") })
			})
		}},
		attack{"passwords", "wrong passwords without end from 32 addresses, of users that there are and are not", func(ctx context.Context, g *target) {
			parallel(64, func(i int) {
				from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(i%32+1))}}
				client := &http.Client{Transport: &http.Transport{DialContext: from.DialContext}}
				n := 0
				again(ctx, func() {
					n++
					query(ctx, client, "http://"+g.Admin+"/", []string{operator, "nobody"}[n%2], fmt.Sprint("guess", i, n))
				})
			})
		}},
	)
}

// query asks for a page, with a password unless there is no user, and returns
// the status, 0 without an answer.
func query(ctx context.Context, client *http.Client, url, user, password string) int {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0
	}
	if user != "" {
		req.SetBasicAuth(user, password)
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// operator is the user of the admin port, whose password is her name.
const operator = "ann"

// passwords writes the file of the admin port's users.
func passwords(t *testing.T, dir string) string {
	t.Helper()
	hash, err := bcrypt.GenerateFromPassword([]byte(operator), bcrypt.DefaultCost)
	must(t, err)
	file := filepath.Join(dir, "passwords")
	must(t, os.WriteFile(file, []byte(operator+":"+string(hash)+"\n"), 0o600))
	return file
}

// TestLoginUnderAttack shows that an operator gets in while others send wrong
// passwords.
func TestLoginUnderAttack(t *testing.T) {
	b := startBridge(t, nil)
	b.Scale = 0.1
	for _, a := range attacks {
		if a.name != "passwords" {
			continue
		}
		stop := b.attack(t, a)
		testwait.Eventually(t, patience, "a guess to be refused", func() (string, bool) {
			text := string(read(t, b.log))
			return text, strings.Contains(text, "result=refused")
		})
		began := time.Now()
		for _, address := range []string{"/", "/api/v1/status"} {
			// The first time on a quiet machine. Where a hash takes seconds,
			// the turn may come after the ten that a caller waits.
			testwait.Eventually(t, patience, address, func() (string, bool) {
				code := query(t.Context(), http.DefaultClient, "http://"+b.Admin+address, operator, operator)
				t.Logf("%s: %d after %v", address, code, time.Since(began))
				return strconv.Itoa(code), code == http.StatusOK
			})
		}
		stop()
	}
	b.running(t)
}
