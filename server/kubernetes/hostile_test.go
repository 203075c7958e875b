package kubernetes

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
	"github.com/isthmus-mesh/isthmus/server/servertest"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// answers are what no API server should say, beside what some may.
var answers = []struct {
	code int
	body string
}{
	{200, ``},
	{200, `null`},
	{200, `[]`},
	{200, `{`},
	{200, `"x"`},
	{200, "\x00\xff"},
	{200, `{"kind":"ServiceEntryList"}`},
	{200, strings.Repeat("[", 20000)},
	{200, `{"kind":"ServiceEntry","apiVersion":"networking.istio.io/v1"}`},
	{200, `{"kind":"ServiceEntry","apiVersion":"networking.istio.io/v1","metadata":5,"spec":[]}`},
	{200, `{"kind":"ServiceEntry","apiVersion":"networking.istio.io/v1","metadata":{"name":7,"labels":{"isthmus.io/consumer":["ambient"]},"uid":{}}}`},
	{200, `{"kind":"ServiceEntry","apiVersion":"networking.istio.io/v1","metadata":{"name":"web.isthmus-stub","namespace":"shop","uid":"a","resourceVersion":"1","labels":{"isthmus.io/consumer":"ambient"}},"spec":{"hosts":7}}`},
	{200, `{"kind":"ServiceEntryList","apiVersion":"networking.istio.io/v1","items":[5,null,{}]}`},
	{200, `{"kind":"ServiceEntryList","apiVersion":"networking.istio.io/v1","metadata":{"continue":"x"},"items":[]}`},
	{200, `{"kind":"ServiceEntryList","apiVersion":"networking.istio.io/v1","metadata":{},"items":[]}`},
	{200, `{"kind":"ServiceEntryList","apiVersion":"networking.istio.io/v1","items":[{"metadata":{"name":"web.isthmus-stub","namespace":"shop","uid":"a","resourceVersion":"1","labels":{"isthmus.io/consumer":"ambient"},"annotations":{"isthmus.io/hash":"x"}}}]}`},
	{200, `{"kind":"ServiceEntryList","apiVersion":"networking.istio.io/v1","items":[{"metadata":{"name":"","namespace":"","uid":"a","resourceVersion":"1","labels":{"isthmus.io/consumer":"ambient"}}}]}`},
	{301, ``},
	{401, ``},
	{403, `{"kind":"Status","code":403,"reason":"Forbidden","message":"no"}`},
	{404, ``},
	{404, `{"kind":"Status","code":404,"reason":"NotFound"}`},
	{409, `{"kind":"Status","code":409,"reason":"Conflict"}`},
	{409, `{"kind":"Status","code":409,"reason":"AlreadyExists"}`},
	{410, `{"kind":"Status","code":410,"reason":"Expired"}`},
	{422, `{"kind":"Status","code":422,"reason":"Invalid","details":{"causes":[null]}}`},
	{429, ``},
	{500, `x`},
	{503, `{"kind":"Status","code":-1}`},
	{599, ``},
}

// Whatever the API server answers, the consumer goes on, and removes no stub of
// a service that is served.
func TestHostileServer(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			var mu sync.Mutex
			random, requests := rand.New(rand.NewPCG(seed, 31)), atomic.Int64{}
			lease := `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"isthmus-ambient","namespace":"default","resourceVersion":"1"}}`
			srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				if strings.Contains(r.URL.Path, "/leases") {
					_, _ = io.WriteString(w, lease)
					return
				}
				requests.Add(1)
				if r.Method == http.MethodDelete && strings.HasSuffix(r.URL.Path, "/web.isthmus-stub") {
					t.Errorf("%s %s", r.Method, r.URL)
				}
				mu.Lock()
				a := answers[random.IntN(len(answers))]
				mu.Unlock()
				w.Header().Set("Location", "https://127.0.0.1:1/")
				w.WriteHeader(a.code)
				_, _ = io.WriteString(w, a.body)
			}))
			defer srv.Close()
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
			named := func(key string, value any) []any { return []any{map[string]any{"name": "x", key: value}} }
			text, err := yaml.Marshal(map[string]any{
				"apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": named("context", map[string]any{"cluster": "x", "user": "x"}),
				"clusters": named("cluster", map[string]any{"server": srv.URL, "certificate-authority-data": ca}), "users": named("user", map[string]any{"token": "t"}),
			})
			file := filepath.Join(t.TempDir(), "kubeconfig")
			if err == nil {
				err = os.WriteFile(file, text, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}

			w := servertest.New(t, state.Options{})
			w.Entry("shop/web", "web.shop")
			log := new(testwait.Buffer)
			consumer, err := New(w.View, Options{
				Make: &Stub{Meta: Meta{Consumer: "ambient"}, Waypoint: "waypoint"}, Kubeconfig: file, WritesPerSecond: 1000,
				Has: func(string) bool { return true }, Complete: func() bool { return true },
				listEvery: 20 * time.Millisecond, minPause: time.Millisecond, maxPause: 2 * time.Millisecond,
			}, slog.New(slog.NewTextHandler(log, nil)))
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			var group sync.WaitGroup
			group.Go(func() { consumer.Run(ctx) }) // ends with cancel
			defer group.Wait()
			defer cancel()
			testwait.Eventually(t, testenv.Patience, "many requests", func() (string, bool) {
				for range consumer.Objects() { // which may be asked for at any time
					continue
				}
				return fmt.Sprintf("%d, %+v\n%s", requests.Load(), consumer.Status(), log), requests.Load() > 300
			})
			if strings.Contains(log.String(), "defect") {
				t.Error(log)
			}
		})
	}
}
