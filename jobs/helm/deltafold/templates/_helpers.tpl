{{- define "deltafold.selector" -}}
app.kubernetes.io/name: deltafold
app.kubernetes.io/component: controller
{{- end }}
{{- define "deltafold.image" -}}
{{ required "image.repository: name the image that you built and pushed, such as registry.example/deltafold: README.md of this chart says how" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- define "deltafold.jobImage" -}}
{{ .Values.jobImage | default (include "deltafold.image" .) }}
{{- end }}
{{- define "deltafold.rules" -}}
- apiGroups: ["deltafold.io"]
  resources: ["etcdbackuppolicies"]
  verbs: ["get", "list", "watch"]
- apiGroups: ["deltafold.io"]
  resources: ["etcdbackuptasks"]
  verbs: ["delete", "get", "list", "watch"]
- apiGroups: ["deltafold.io"]
  resources: ["etcdbackuppolicies/status", "etcdbackuptasks/status"]
  verbs: ["patch"]
- apiGroups: ["deltafold.io"]
  resources: ["etcdbackuppolicies/finalizers", "etcdbackuptasks/finalizers"]
  verbs: ["update"]
- apiGroups: ["batch"]
  resources: ["cronjobs"]
  verbs: ["create", "delete", "get", "list", "patch", "watch"]
- apiGroups: ["batch"]
  resources: ["jobs"]
  verbs: ["create", "delete", "get", "list", "watch"]
- apiGroups: ["apps"]
  resources: ["deployments"]
  verbs: ["create", "delete", "get", "list", "patch", "watch"]
- apiGroups: [""]
  resources: ["pods"]
  verbs: ["get", "list", "watch"]
- apiGroups: ["coordination.k8s.io"]
  resources: ["leases"]
  verbs: ["create", "get", "list", "watch"]
- apiGroups: ["discovery.k8s.io"]
  resources: ["endpointslices"]
  verbs: ["get", "list", "watch"]
- apiGroups: [""]
  resources: ["events"]
  verbs: ["create", "get", "list", "patch"]
{{- end }}
{{- /* An admission policy and its binding. The argument is a dict of root, what, resource and validations. */ -}}
{{- define "deltafold.admission" -}}
{{- $name := printf "deltafold-%s-%s" .what .root.Release.Namespace }}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: {{ $name }}
  labels:
    app.kubernetes.io/name: deltafold
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: ["deltafold.io"]
        apiVersions: ["v1alpha1"]
        operations: ["CREATE", "UPDATE"]
        resources: [{{ .resource | quote }}]
  matchConditions:
    - name: spec-is-new-or-changed
      expression: request.operation == 'CREATE' || object.spec != oldObject.spec
  validations:
    {{- range .validations }}
    - expression: {{ .expression | toJson }}
      message: {{ .message | quote }}
      reason: Forbidden
    {{- end }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ $name }}
  labels:
    app.kubernetes.io/name: deltafold
spec:
  policyName: {{ $name }}
  validationActions: ["Deny"]
  {{- with .root.Values.watchNamespaces }}
  matchResources:
    namespaceSelector:
      matchExpressions:
        - key: kubernetes.io/metadata.name
          operator: In
          values:
            {{- toYaml . | nindent 12 }}
  {{- end }}
{{- end }}
